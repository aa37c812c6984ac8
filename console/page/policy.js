// The policy: what is in force, how communicators stand to it, what another one would change, and what was done.

import { perform, resting } from "/act_view.js";
import { ACTS } from "/acts.js";
import { get } from "/api.js";
import { compared } from "/diff.js";
import { facts, h, say } from "/dom.js";
import { Table, filterOf } from "/table.js";
import { age } from "/units.js";

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
  const apply = h("button", { type: "button", class: "acts", hidden: true, onclick: act }, "Put in force…");
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
      h("p", {}, h("label", { for: "candidate" }, "A policy file's text. To compare it puts nothing in force.")), input,
      h("p", { class: "tools" }, h("button", { type: "button", onclick: compare }, "Compare"), apply), told, changes),
    h("section", { "aria-labelledby": "past" }, h("h2", { id: "past" }, "What was done"), historyFilter.element, history.element));

  async function compare() {
    say(told, "Comparing…");
    changes.hidden = true;
    try {
      const { told: many, lines: all } = await compared(input.value);
      say(told, many);
      changes.replaceChildren(...all.flatMap((line) => {
        const mark = line.trimStart()[0];
        return [h("span", { class: mark === "+" ? "add" : mark === "-" ? "del" : null }, line), "\n"];
      }));
      changes.hidden = all.length === 0;
    } catch (error) {
      say(told, error.message);
    }
  }

  async function act() {
    changes.hidden = true;
    await resting(apply, () => perform(app, ACTS.find((kind) => kind.act === "policy_apply"), { text: input.value }, told));
    lookAtHistory();
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
      apply.hidden = !app.token?.may("policy");
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
