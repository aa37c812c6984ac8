// What another policy would change: asked of the service, and told line by line, as mccsctl policy diff does.

import { post } from "/api.js";
import { plural } from "/units.js";

// A strategy, line by line, as mccsctl has it.
function lines({ algorithm, transport, rings, flows }) {
  const all = algorithm === "auto" ? [] : [`algorithm ${algorithm}`];
  if (transport) all.push(`flows over ${transport}`);
  rings.forEach((ring, channel) => {
    all.push(`channel ${channel}: ring ${ring.join(" ")}`);
    for (const flow of flows.filter((one) => one.channel === channel)) {
      all.push(`  ${flow.from} -> ${flow.to}: ${flow.path}${flow.priority == null ? "" : `, priority ${flow.priority}`}`);
    }
  });
  return all;
}

// Lines that stay, go and come.
function marked(before, after) {
  const [gone, come] = [new Set(before), new Set(after)];
  const old = before.map((line) => [come.has(line) ? " " : "-", line]);
  return old.concat(after.filter((line) => !gone.has(line)).map((line) => ["+", line]));
}

function difference(view) {
  const title = `${view.changes ? "~" : " "} communicator ${view.name}, tenant ${view.tenant}`;
  const after = view.after?.Ok ?? view.after?.ok;
  const why = view.after?.Err ?? view.after?.err;
  const text = [title];
  if (why) text.push(`    left as it is: ${why}`);
  if (after && view.changes_strategy) text.push(...marked(lines(view.before), lines(after)).map(([mark, line]) => `  ${mark} ${line}`));
  else if (after && view.changes) text.push("    its rings and flows stay; caps, shares or windows change");
  return text;
}

// What a policy's text would change, in a word and in lines. Nothing is put in force.
export async function compared(text) {
  const { controller: { diff } } = await post("policy/diff", text);
  const many = diff.communicators.filter((view) => view.changes).length;
  return {
    told: many ? `${plural(many, "communicator")} would change.` : "Nothing would change.",
    lines: diff.not_enforced.map((line) => `decided, not enforced: ${line}`).concat(diff.communicators.flatMap(difference)),
  };
}
