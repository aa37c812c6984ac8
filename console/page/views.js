// Views: each a list of elements, and how it follows what is known.

import { facts, h, say, tiles } from "/dom.js";
import { Table, filterOf } from "/table.js";
import { age, bitRate, byteRate, bytes, count, percent, plural, time } from "/units.js";

const num = (name, value, text = count) => ({ name, value, text, kind: "num" });
const words = (name, value) => ({ name, value, text: (text) => text || "-" });

function sum(rows, of) {
  return rows.reduce((total, row) => total + (of(row) ?? 0), 0);
}

export function nowView(app) {
  const summary = h("div");
  const title = h("h2", { id: "wrong" }, "What is wrong");
  const list = h("ul", { class: "troubles", "aria-labelledby": "wrong" });
  const well = h("p", { class: "well" }, "Nothing that this host knows of.");
  let shown = "";
  return {
    elements: [summary, h("section", { "aria-labelledby": "wrong" }, title, list, well)],
    update(model, all) {
      const hosts = model.hostRows();
      const rows = model.communicators;
      summary.replaceChildren(tiles([
        ["hosts up", `${hosts.filter((row) => row.isUp).length} of ${hosts.length}`],
        ["communicators", count(rows.length)],
        ["tenants", count(model.now.tenants.length)],
        ["operations", `${count(sum(rows, (row) => row.operations))}/s`],
        ["payload here", byteRate(sum(model.tenantRows(), (row) => row.bytes))],
        ["in flight here", count(sum(model.tenantRows(), (row) => row.inFlight))],
      ]));
      well.hidden = all.length > 0;
      // Only what has changed is written anew: a focus inside stays.
      const next = JSON.stringify(all);
      if (next === shown) return;
      shown = next;
      const focused = document.activeElement?.closest?.(".troubles a")?.getAttribute("href");
      list.replaceChildren(...all.slice(0, 200).map((one) => h("li", { class: one.isBad ? "bad" : null },
        h("p", {}, h("strong", {}, one.what), one.open ? h("a", { href: `#/communicators/${one.open}` }, one.text) : one.text),
        one.lines.slice(0, 8).map((line) => h("p", {}, line)))));
      if (all.length > 200) list.append(h("li", {}, `${all.length - 200} more`));
      if (focused) list.querySelector(`a[href="${CSS.escape(focused).replaceAll("\\", "")}"]`)?.focus();
    },
  };
}

export function communicatorsView(app) {
  const table = new Table("Communicators", [
    { name: "number", value: (row) => row.number, text: (number) => String(number) },
    words("name", (row) => row.name),
    words("tenant", (row) => row.tenant),
    words("job", (row) => row.job),
    words("where", (row) => row.where),
    num("ranks", (row) => row.nranks),
    num("ops/s", (row) => row.operations),
    num("payload", (row) => row.bytes, byteRate),
    num("bus bandwidth", (row) => row.busBandwidth, byteRate),
    { name: "busy", value: (row) => row.busy, text: (part) => (part == null ? "-" : percent(part)), kind: "load", part: (row) => row.busy },
    { name: "comes last here", value: (row) => row.last?.ns ?? null, text: (ns, row) => (ns == null ? "-" : `rank ${row.last.rank} +${time(ns / 1e9)}`), kind: "num" },
    num("failed", (row) => row.failed),
    num("still for", (row) => (row.still >= 2 ? row.still : null), (still) => (still == null ? "-" : age(still))),
  ], {
    key: (row) => row.key,
    isBad: (row) => row.still >= 5,
    empty: "There are no communicators.",
    opens: (row) => { if (row.comm) location.hash = `#/communicators/${row.key}`; },
  });
  const filter = filterOf(table);
  return {
    elements: [filter.element, table.element],
    update(model) {
      table.show(model.communicators);
      filter.tell();
    },
  };
}

export function tenantsView() {
  const table = new Table("Tenants and shares on this host", [
    words("tenant", (row) => row.tenant),
    num("sessions", (row) => row.sessions),
    num("communicators", (row) => row.communicators),
    { name: "memory", value: (row) => row.memory, text: (memory, row) => `${bytes(memory)} (${percent(row.memoryPart)})`, kind: "load", part: (row) => row.memoryPart },
    num("in flight", (row) => row.inFlight),
    num("ops/s", (row) => row.operations),
    num("payload", (row) => row.bytes, byteRate),
    num("weight", (row) => row.weight, (weight) => (weight == null ? "-" : String(weight))),
    num("flow cap", (row) => row.flowCap, bitRate),
    num("host cap", (row) => row.hostCap, bitRate),
    num("may send", (row) => row.allotted, bitRate),
    num("p50 up to", (row) => row.p50, time),
    num("p99 up to", (row) => row.p99, time),
    num("failed", (row) => row.failed),
  ], { key: (row) => row.tenant, empty: "There are no tenants." });
  const filter = filterOf(table);
  return {
    elements: [filter.element, table.element],
    update(model) {
      table.show(model.tenantRows());
      filter.tell();
    },
  };
}

export function hostsView() {
  const table = new Table("Hosts", [
    words("host", (row) => row.host),
    { name: "state", value: (row) => (row.isUp ? "up" : "down") },
    num("since", (row) => row.since, (since) => (since == null ? "-" : age(since))),
    words("address", (row) => row.address),
    words("version", (row) => row.version),
    num("sessions", (row) => row.sessions),
    num("communicators", (row) => row.communicators),
    num("GPUs", (row) => row.gpus),
    num("sends", (row) => row.sends, bitRate),
    num("receives", (row) => row.receives, bitRate),
    num("certificate ends in", (row) => row.certificate, (left) => (left == null ? "-" : age(left))),
    words("remarks", (row) => row.remarks),
  ], { key: (row) => row.host, isBad: (row) => !row.isUp || row.remarks !== "", empty: "There is one host." });
  const filter = filterOf(table);
  const note = h("p", { class: "empty" });
  return {
    elements: [filter.element, table.element, note],
    update(model) {
      table.show(model.hostRows());
      filter.tell();
      say(note, [
        model.cluster ? "" : "Sessions and versions of other hosts need [controller] in service.toml.",
        model.policy ? "" : "Load of hosts is known on the controller's host.",
      ].join(" "));
      note.hidden = note.textContent.trim() === "";
    },
  };
}

export function linksView() {
  const links = new Table("Links of the network", [
    words("from", (row) => row.from),
    words("to", (row) => row.to),
    { name: "load", value: (row) => (row.capacity ? row.bps / row.capacity : null), text: (part) => (part == null ? "-" : percent(part)), kind: "load", part: (row) => (row.capacity ? row.bps / row.capacity : 0) },
    num("payload", (row) => row.bps, bitRate),
    num("capacity", (row) => row.capacity, bitRate),
    words("state", (row) => row.state),
  ], { key: (row) => row.key, isBad: (row) => row.state !== "", empty: "The controller's host knows the load of links; here none is known." });
  const paths = new Table("Paths of this host", [
    words("peer", (row) => row.peer),
    words("direction", (row) => row.direction),
    words("path", (row) => row.path),
    num("flows", (row) => row.flows),
    num("payload", (row) => row.bytes, byteRate),
    num("in all", (row) => row.total, bytes),
    num("round trip", (row) => row.roundTrip, time),
    num("sent again", (row) => row.loss, (loss) => (loss == null ? "-" : `${(100 * loss).toFixed(2)}%`)),
  ], { key: (row) => row.key, empty: "Nothing has gone to or come from other hosts." });
  const filter = filterOf(links, paths);
  return {
    elements: [filter.element, links.element, paths.element],
    update(model) {
      links.show(model.linkRows());
      paths.show(model.pathRows());
      filter.tell();
    },
  };
}

export { facts, plural };
