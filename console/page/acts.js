// What a token may do: for each act its fields, what it will do, and what it has done, in words. Pure but for comparing policies.

import { compared } from "/diff.js";
import { plural } from "/units.js";

const field = (name, label, more = {}) => ({ name, label, kind: "text", ...more });
const optional = { isOptional: true };
const COMMUNICATOR = field("communicator", "Number of the communicator", { kind: "number" });

function sessions(model, tenant = null) {
  const rows = model.now ? model.tenantRows() : [];
  return rows.filter((row) => tenant === null || row.tenant === tenant).reduce((sum, row) => sum + row.sessions, 0);
}

function host(model) {
  return model.now?.host ?? "this host";
}

// A communicator of this host, as people know it.
function named(number, model) {
  const comm = model.now?.communicators.find((one) => one.communicator === Number(number));
  if (!comm) return `Communicator ${number}, which this host does not have now,`;
  return `Communicator ${number}${comm.name ? ` (${comm.name})` : ""} of tenant ${comm.tenant}`;
}

function applied({ controller }) {
  if (!controller?.applied) return "Noted: it counts from now on, and goes with what is being put in force.";
  const { changed, paced, kept, away, not_enforced: without } = controller.applied;
  const parts = [`In force: ${plural(changed.length, "communicator")} changed`];
  if (paced.length) parts.push(`${plural(paced.length, "communicator")} got other caps, shares or windows`);
  if (kept.length) parts.push(`communicator ${kept[0][0]} keeps its strategy: ${kept[0][1]}${kept.length > 1 ? `, and ${kept.length - 1} more` : ""}`);
  if (away.length) parts.push(`not there now, and told later: ${away.join(", ")}`);
  if (without.length) parts.push(`without effect: ${without.join("; ")}`);
  return `${parts.join("; ")}.`;
}

// The numbers of users, as JSON has them.
function users(text) {
  const words = text.split(/[\s,]+/).filter(Boolean);
  if (!words.every((word) => /^[0-9]+$/.test(word))) throw new Error("Users are numbers, such as 1000, 1001.");
  return words.map(Number);
}

export const ACTS = [
  {
    act: "drain", right: "host", title: "Drain this host", button: "Drain",
    fields: [field("reason", "Reason, for the history and for who is refused", optional)],
    will: (_, model) => [`${host(model)} refuses new processes, until somebody lets them in again or its service restarts.`,
      `${plural(sessions(model), "session")} of ${host(model)} go on until they end.`],
    done: ({ drain }) => `No new processes; ${plural(drain.sessions, "session")} with ${plural(drain.communicators, "communicator")} go on.`,
  },
  {
    act: "undrain", right: "host", title: "Take new processes again", button: "Take them", fields: [],
    will: (_, model) => [`${host(model)} takes new processes again.`],
    done: () => "New processes are taken.",
  },
  {
    act: "policy_apply", right: "policy", title: "Put a policy in force", button: "Put in force",
    fields: [field("text", "The policy file's text", { kind: "long" })],
    ask: ({ text }) => compared(text),
    will: (_, __, asked) => [`${asked.told} All communicators change, or none: if one refuses, all go back.`],
    done: applied,
  },
  {
    act: "policy_rollback", right: "policy", title: "Go back to the policy before", button: "Go back", fields: [],
    will: (_, model) => [`The policy that was in force before ${model.policy?.policy ?? "this one"} is in force again, and communicators change as it decides.`],
    done: applied,
  },
  {
    act: "link", right: "policy", title: "Mark a link", button: "Mark",
    fields: [field("lower", "Leaf, or host"), field("upper", "Spine, or leaf"),
      field("state", "It is", { kind: "choice", choices: ["up", "down", "of another rate"] }),
      field("rate", "Rate, such as 25Gbit/s", optional)],
    make: ({ lower, upper, state, rate }) => {
      if (state !== "of another rate") return { lower, upper, state };
      if (!rate) throw new Error("A link of another rate needs the rate, such as 25Gbit/s.");
      return { lower, upper, state: { rate } };
    },
    will: ({ lower, upper, state }) => {
      const rate = state.rate ? `of ${state.rate}` : state;
      return [`The controller takes the link from ${lower} to ${upper} as ${rate}, until it is marked otherwise.`, "Flows change their paths as the policy decides."];
    },
    done: applied,
  },
  {
    act: "tenant_add", right: "tenants", title: "Add a tenant", button: "Add",
    fields: [field("name", "Name"), field("uids", "Numbers of users that may connect; none: every user", optional),
      field("rules", "Tenant of policy.toml whose rules hold; none: its name", optional),
      field("weight", "Weight, 1 to 100", { kind: "number", ...optional }),
      field("max_memory", "Most host memory, such as 64GiB", optional)],
    make: ({ uids, ...tenant }) => ({ tenant: { ...tenant, ...(uids ? { uids: users(uids) } : {}) } }),
    will: ({ tenant }, model) => [`${host(model)} has a tenant ${tenant.name}, with a socket of its own, until it is removed.`,
      tenant.uids ? `Users ${tenant.uids.join(", ")} may connect.` : "Every user of the host may connect."],
    done: ({ tenant_added: { socket } }) => `It is there; its processes connect at ${socket}.`,
  },
  {
    act: "tenant_remove", right: "tenants", title: "Remove a tenant", button: "Remove",
    fields: [field("name", "Name of a tenant that was added while the service ran")],
    will: ({ name }, model) => [`Tenant ${name} goes: its ${plural(sessions(model, name), "session")} on ${host(model)} end, and their calls fail.`],
    done: () => "It is removed; its sessions end.",
  },
  {
    act: "reconfigure", right: "communicators", title: "Change a communicator's strategy", button: "Change",
    fields: [COMMUNICATOR, field("change", "Text of a change.toml, such as channels = 2", { kind: "long" }),
      field("window", "Collectives that may start meanwhile", { kind: "number", ...optional })],
    will: ({ communicator }, model) => [`${named(communicator, model)} changes its strategy between two collectives, on all its hosts.`,
      "It is pinned then: the controller leaves it alone until it is released."],
    done: ({ reconfigured: { epoch, cut } }) => `Strategy ${epoch} holds from collective ${cut} on.`,
  },
  {
    act: "unpin", right: "communicators", title: "Release a communicator", button: "Release", fields: [COMMUNICATOR],
    will: ({ communicator }, model) => [`${named(communicator, model)} is the controller's again, which may change its strategy.`],
    done: () => "It is the controller's again.",
  },
];

// An act's JSON of what was filled in. Throws what is wrong.
export function madeOf(kind, values) {
  const given = {};
  for (const { name, label, kind: type, isOptional } of kind.fields) {
    const text = values[name]?.trim() ?? "";
    if (!text && !isOptional) throw new Error(`${label}: nothing is filled in.`);
    if (text && type === "number" && !/^[0-9]{1,15}$/.test(text)) throw new Error(`${label}: ${text} is no whole number.`);
    if (text) given[name] = type === "number" ? Number(text) : text;
  }
  return { act: kind.act, ...(kind.make ? kind.make(given) : given) };
}
