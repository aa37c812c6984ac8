// What is wrong, the worst first; each with what it is about and what to do.

import { age, percent, plural } from "/units.js";

const STANDS_STILL_SECONDS = 5;
const DAY = 86400;

const CLASSES = {
  rank: "waits for ranks that have not called",
  flow: "waits for data that does not come",
  gpu: "waits for GPUs",
  host: "waits for hosts that do not answer",
  busy: "is not known: hosts are too busy to say",
  failed: "has failed",
  running: "runs",
  not_stuck: "waits for nothing",
};

export function verdict(stuckClass) {
  return CLASSES[stuckClass] ?? stuckClass;
}

export function culprit({ host, rank, pid, gpu, what }) {
  const about = [pid == null ? null : `process ${pid}`, gpu == null ? null : `GPU ${gpu}`].filter(Boolean).join(", ");
  return `${host}${rank == null ? "" : ` rank ${rank}`}${about ? ` (${about})` : ""}: ${what}`;
}

function trouble(isBad, what, text, more = {}) {
  return { isBad, what, text, key: `${what}|${more.about ?? text}`, lines: [], ...more };
}

// Communicators of this host that have had work for some seconds and have not moved.
export function standing(model) {
  const still = (model.communicators ?? []).filter((row) => row.still >= STANDS_STILL_SECONDS && row.comm.part_of == null);
  return still.sort((a, b) => b.still - a.still);
}

export function troubles(model, reports) {
  const { now, cluster, policy, failed } = model;
  if (!now) return [];
  const all = [];
  const add = (...parts) => all.push(trouble(...parts));
  const reported = new Set();
  for (const { host, summary } of model.stuck?.hosts ?? []) {
    for (const one of summary?.stuck ?? []) {
      const isHere = host === now.host || host === "this host";
      if (isHere) reported.add(one.communicator);
      const lines = one.culprits.map(culprit);
      const about = `${host} ${one.communicator}`;
      add(true, "stuck", `communicator ${one.communicator} of ${isHere ? now.host : host}, tenant ${one.tenant}, ${verdict(one.class)}`, { about, lines, open: isHere ? `${one.communicator}` : null });
    }
  }
  for (const { comm, still } of standing(model)) {
    if (reported.has(comm.communicator)) continue;
    const report = reports.get(comm.communicator);
    const lines = report ? report.culprits.map(culprit) : [];
    const why = report ? `; ${verdict(report.class)}` : "";
    add(true, "stands still", `communicator ${comm.communicator}${comm.name ? ` (${comm.name})` : ""}, tenant ${comm.tenant}, for ${age(still)}${why}`, { about: comm.communicator, lines, open: `${comm.communicator}` });
  }
  const down = new Set();
  for (const row of model.hostRows().filter((row) => !row.isUp)) {
    down.add(row.host);
    add(true, "host down", `${row.host}${row.since == null ? "" : ` since ${age(row.since)}`}: ${row.remarks}`, { about: row.host });
  }
  for (const { host, summary, trouble: why } of cluster?.hosts ?? []) {
    if (!summary && why && !down.has(host)) add(true, "host silent", `${host}: ${why}`, { about: host });
    if (summary?.draining) add(false, "drained", `${host}${summary.draining_reason ? `: ${summary.draining_reason}` : ""}`);
    if (summary?.unreachable.length) add(true, "unreachable", `${host} cannot reach ${summary.unreachable.join(", ")}`);
    for (const lost of summary?.gpus_lost ?? []) add(true, "GPU lost", `${host}: ${lost}`);
  }
  if (!cluster && now.draining) add(false, "drained", `${now.host}${now.draining_reason ? `: ${now.draining_reason}` : ""}`);
  for (const gpu of now.gpus ?? []) if (gpu.lost) add(true, "GPU lost", `${gpu.gpu}: ${gpu.lost}`);
  const joining = new Map([...now.joining, ...(cluster?.hosts ?? []).flatMap(({ summary }) => summary?.joining ?? [])].map((late) => [late.unique_id, late]));
  for (const late of joining.values()) {
    add(false, "joining", `${late.unique_id}, tenant ${late.tenant}: ${late.joined} of ${late.nranks} ranks since ${age(late.since_seconds)}, waits for ${late.waits_for}`, { about: late.unique_id });
  }
  for (const file of policy?.files ?? []) {
    const { standing: state } = file;
    if (state.refused) add(true, "file refused", `${file.file}: ${state.refused.reason}`, { about: file.file });
    if (state.unreadable) add(true, "file unreadable", `${file.file}: ${state.unreadable.reason}`, { about: file.file });
    if (state === "rolled_back") add(true, "rolled back", `${file.file}: a communicator refused it; mend it`);
    if (state.differs) add(false, "file differs", `${file.file} differs from what is in force, in line ${state.differs.line}`, { about: file.file });
  }
  for (const [lower, upper, why] of policy?.dead_links ?? []) add(true, "link dead", `${lower} to ${upper}: ${why} over it`);
  for (const [lower, upper, state] of policy?.links ?? []) add(false, "link", `${lower} to ${upper}: ${typeof state === "string" ? state : JSON.stringify(state)}`);
  for (const line of policy?.contradictions ?? []) add(true, "topology", line);
  for (const [host, why] of policy?.turned_away ?? []) add(true, "turned away", `by ${host}: ${why}`);
  const past = new Map([...failed, ...(cluster?.hosts ?? []).flatMap(({ summary }) => summary?.failed ?? [])].map((one) => [one.unique_id, one]));
  for (const one of past.values()) {
    add(false, "failed", `${one.unique_id}, tenant ${one.tenant}, ${age(one.age_seconds)} ago: ${one.reason}`, { about: one.unique_id });
  }
  for (const tenant of now.tenants) {
    for (const { resource, used, limit } of tenant.quotas) {
      if (limit > 0 && used / limit >= 0.9) add(false, "quota", `tenant ${tenant.tenant} uses ${percent(used / limit)} of ${resource}`, { about: `${tenant.tenant} ${resource}` });
    }
  }
  for (const row of model.hostRows()) {
    if (row.certificate != null && row.certificate < 30 * DAY) add(row.certificate < 7 * DAY, "certificate", `of ${row.host} ends in ${age(Math.max(0, row.certificate))}`, { about: row.host });
  }
  const { communicators } = now.omitted;
  if (communicators) add(false, "left out", `${plural(communicators, "communicator")}: the service tells of the first 1,024`, { about: "communicators" });
  return all.sort((a, b) => b.isBad - a.isBad);
}
