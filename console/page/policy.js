// The policy: what is in force, how communicators stand to it, what another one would change, and what was done.

import { get, post } from "/api.js";
import { facts, h, say } from "/dom.js";
import { Table, filterOf } from "/table.js";
import { age, plural } from "/units.js";

const STATES = { as_decided: "as decided", pinned: "pinned by hand", ordered: "a change is ordered", undecided: "not decided yet" };

function standing(state) {
  if (typeof state === "string") return STATES[state] ?? state;
  if (state.refused != null) return `change refused: ${state.refused}`;
  return state.outside != null ? `left as it is: ${state.outside}` : JSON.stringify(state);
}

function went(state) {
  if (typeof state === "string") return state === "pending" ? "under way" : state;
  if (state.done_but != null) return `done, but ${state.done_but}`;
  return state.failed != null ? `not done: ${state.failed}` : JSON.stringify(state);
}

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

export function policyView(app) {
  const about = h("div");
  const why = h("p", { class: "empty" });
  const files = h("ul", { class: "troubles" });
  const text = h("pre", { tabindex: 0, "aria-label": "Text of the policy in force" });
  const communicators = new Table("Communicators of several hosts, and the policy", [
    { name: "name", value: (row) => row.name },
    { name: "tenant", value: (row) => row.tenant },
    { name: "strategy", value: (row) => row.epoch, text: String, kind: "num" },
    { name: "standing", value: (row) => standing(row.state) },
    { name: "algorithm", value: (row) => row.strategy.algorithm },
    { name: "transport", value: (row) => row.strategy.transport ?? "-" },
    { name: "channels", value: (row) => row.strategy.rings.length, text: String, kind: "num" },
  ], { key: (row) => row.name, isShort: true, isBad: (row) => typeof row.state === "object", empty: "There are none." });
  const filter = filterOf(communicators);
  const input = h("textarea", { id: "candidate", spellcheck: "false" });
  const changes = h("pre", { tabindex: 0, hidden: true, "aria-label": "What would change" });
  const told = h("p", { role: "status" });
  const history = new Table("History", [
    { name: "number", value: (entry) => entry.number, text: String, kind: "num" },
    { name: "ago", value: (entry) => entry.age_ms / 1000, text: age, kind: "num" },
    { name: "kind", value: (entry) => entry.kind },
    { name: "what", value: (entry) => entry.what },
    { name: "why", value: (entry) => entry.why || "-" },
    { name: "went", value: (entry) => went(entry.went) },
    { name: "by", value: (entry) => entry.by ?? "-" },
  ], { key: (entry) => entry.number, isShort: true, isBad: (entry) => entry.went.failed != null, empty: "Nothing was done." });
  history.sort(0);
  if (history.isUp) history.sort(0);
  const historyFilter = filterOf(history);
  const whole = h("div", { class: "sections", hidden: true },
    h("section", { "aria-labelledby": "in-force" }, h("h2", { id: "in-force" }, "In force"), about, files,
      h("details", {}, h("summary", {}, "Text of the policy"), text)),
    h("section", { "aria-labelledby": "standing" }, h("h2", { id: "standing" }, "Communicators"), filter.element, communicators.element),
    h("section", { "aria-labelledby": "compare" }, h("h2", { id: "compare" }, "What would another policy change?"),
      h("p", {}, h("label", { for: "candidate" }, "A policy file's text. Nothing is put in force.")), input,
      h("p", { class: "tools" }, h("button", { type: "button", onclick: compare }, "Compare")), told, changes),
    h("section", { "aria-labelledby": "past" }, h("h2", { id: "past" }, "What was done"), historyFilter.element, history.element));

  async function compare() {
    say(told, "Comparing…");
    changes.hidden = true;
    try {
      const { controller: { diff } } = await post("policy/diff", input.value);
      const many = diff.communicators.filter((view) => view.changes).length;
      say(told, many ? `${plural(many, "communicator")} would change` : "Nothing would change.");
      const all = diff.not_enforced.map((line) => `decided, not enforced: ${line}`).concat(diff.communicators.flatMap(difference));
      changes.replaceChildren(...all.flatMap((line) => {
        const mark = line.trimStart()[0];
        return [h("span", { class: mark === "+" ? "add" : mark === "-" ? "del" : null }, line), "\n"];
      }));
      changes.hidden = all.length === 0;
    } catch (error) {
      say(told, error.message);
    }
  }

  async function lookAtHistory() {
    try {
      const { controller } = await get("policy/history");
      history.show(controller.history);
      historyFilter.tell();
    } catch {
      history.show([]);
    }
  }

  return {
    elements: [why, whole],
    shown: lookAtHistory,
    update(model) {
      const { policy } = model;
      whole.hidden = !policy;
      why.hidden = Boolean(policy);
      say(why, app.noPolicy ?? "asking the controller…");
      if (!policy) return;
      about.replaceChildren(facts([
        ["policy", policy.policy ?? "none is in force"],
        ["file", policy.policy_file],
        ["topology", policy.topology_file],
        ["hosts that report", `${policy.hosts.filter(([, reports]) => reports).length} of ${policy.hosts.length}`],
        ["without effect", policy.not_enforced.join("; ")],
        ["named, and not there", policy.idle_tenants.join(", ")],
      ]));
      const wrong = policy.files.filter((file) => file.standing !== "in_force");
      files.replaceChildren(...wrong.map((file) => h("li", {}, `${file.file}: ${fileStanding(file.standing)}`)));
      say(text, policy.policy_text ?? "");
      communicators.show(policy.communicators);
      filter.tell();
    },
  };
}

function fileStanding(state) {
  if (state.refused) return `refused: ${state.refused.reason}`;
  if (state.unreadable) return `not readable: ${state.unreadable.reason}`;
  if (state.differs) return `line ${state.differs.line} is ${state.differs.on_disk ?? "missing"}, in force is ${state.differs.in_force ?? "nothing"}`;
  return state === "rolled_back" ? "rolled back: mend it" : "nothing is in force yet";
}
