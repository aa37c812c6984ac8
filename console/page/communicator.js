// A communicator in detail: its ranks, who comes last over all hosts, whom it waits for, and a trace.

import { get, post, Watched } from "/api.js";
import { facts, h, say } from "/dom.js";
import { Table } from "/table.js";
import { culprit, verdict } from "/troubles.js";
import { byteRate, bytes, count, time } from "/units.js";

function average(now, before) {
  const times = now.count - before.count;
  return times > 0 ? (now.sum_ns - before.sum_ns) / times : null;
}

// Who comes last on any host, between two accounts: a collective ends everywhere at about the same time, so the host where it takes
// least came last (telemetry::straggler does the same for mccsctl).
export function comesLast(before, now) {
  const came = [];
  for (const [host, account] of now.hosts) {
    const then = before.hosts.find(([name]) => name === host)?.[1];
    if (!account || !then || account.is_busy || then.is_busy) return null;
    const total = ([times, sum]) => ({ count: times, sum_ns: sum });
    const took = average(total(account.joint), total(then.joint));
    if (took == null) return null;
    const late = account.ranks.flatMap((rank) => {
      const old = then.ranks.find((one) => one.rank === rank.rank);
      const by = old && average({ count: rank.started, sum_ns: rank.late_ns }, { count: old.started, sum_ns: old.late_ns });
      return by == null ? [] : [{ host, rank: rank.rank, by }];
    });
    const last = Math.max(0, ...late.map(({ by }) => by));
    came.push(...late.map((one) => ({ ...one, at: one.by - last - took })));
  }
  if (came.length === 0) return null;
  came.sort((a, b) => a.at - b.at);
  const [first, last] = [came[0], came[came.length - 1]];
  return last.at > first.at ? { host: last.host, rank: last.rank, seconds: (last.at - first.at) / 1e9 } : null;
}

export class Detail {
  constructor(element, app) {
    Object.assign(this, { element, app, number: null, accounts: null, before: null, from: null });
    element.addEventListener("keydown", (event) => { if (event.key === "Escape") this.close(); });
  }

  open(number) {
    if (this.number === number) return;
    this.stop();
    if (this.number === null) this.from = document.activeElement;
    Object.assign(this, { number, before: null, last: null });
    this.title = h("h2", { id: "detail-title", tabindex: -1 });
    this.about = h("div");
    this.waits = h("div", { "aria-live": "polite" });
    this.ask = h("button", { type: "button", onclick: () => this.whyStuck() }, "Why does it wait?");
    this.trace = h("button", { type: "button", onclick: () => this.record() }, "Trace one second");
    const toAct = (act) => () => {
      this.app.prefilled = { id: `${act}-communicator`, value: `${this.number}` };
      location.hash = "#/act";
    };
    this.acts = [["reconfigure", "Change its strategy…"], ["unpin", "Release it…"]].map(([act, words]) =>
      h("button", { type: "button", class: "acts", hidden: true, onclick: toAct(act) }, words));
    this.told = h("p", { role: "status" });
    this.ranks = new Table("Ranks on this host", [
      { name: "rank", value: (rank) => rank.rank, text: String, kind: "num" },
      { name: "process", value: (rank) => rank.pid, text: String, kind: "num" },
      { name: "called", value: (rank) => rank.enqueued, text: String, kind: "num" },
      { name: "started", value: (rank) => rank.started, text: String, kind: "num" },
      { name: "ended", value: (rank) => rank.completed, text: String, kind: "num" },
      { name: "late by", value: (rank) => rank.started && rank.late_ns / rank.started, text: (ns) => time(ns / 1e9), kind: "num" },
    ], { key: (rank) => rank.rank, isShort: true, isBad: (rank) => rank.isBehind });
    this.ranks.sort(0);
    if (!this.ranks.isUp) this.ranks.sort(0);
    this.element.replaceChildren(
      h("div", { class: "top" }, this.title, h("button", { type: "button", onclick: () => this.close() }, "Close")),
      this.about,
      h("div", { class: "tools" }, this.ask, this.trace, this.acts),
      this.told, this.waits, h("h3", {}, "Ranks"), this.ranks.element,
    );
    this.element.hidden = false;
    this.update();
    this.title.focus();
  }

  close() {
    if (this.number === null) return;
    this.stop();
    this.number = null;
    this.element.hidden = true;
    if (location.hash.startsWith("#/communicators/")) location.hash = "#/communicators";
    if (this.from?.isConnected) this.from.focus();
    else document.getElementById("main").focus();
  }

  stop() {
    this.accounts?.stop();
    this.accounts = null;
  }

  // All hosts are asked only of the one that somebody looks at.
  watchHosts(comm) {
    if (this.accounts || comm.hosts.length < 2) return;
    const seen = (document) => {
      if (!document) return;
      this.last = this.before ? comesLast(this.before, document.stuck) : null;
      this.before = document.stuck;
    };
    this.accounts = new Watched(`communicators/${comm.communicator}/accounts`, 2000, seen, () => {});
    this.accounts.start();
  }

  update() {
    if (this.number === null || !this.app.model.now) return;
    const row = this.app.model.communicators.find((one) => one.key === this.number);
    say(this.title, `Communicator ${this.number}${row?.name ? ` (${row.name})` : ""}`);
    this.trace.disabled = this.ask.disabled = !row?.comm;
    this.acts.forEach((button) => { button.hidden = !row?.comm || !this.app.token?.may("communicators"); });
    if (!row?.comm) {
      say(this.told, "It is not on this host any more.");
      return;
    }
    const { comm } = row;
    this.watchHosts(comm);
    const here = row.last && `rank ${row.last.rank} +${time(row.last.ns / 1e9)} on average, on this host`;
    const anywhere = this.last && `rank ${this.last.rank} on ${this.last.host} +${time(this.last.seconds)} on average`;
    this.about.replaceChildren(facts([
      ["tenant", comm.tenant],
      ["job", comm.job],
      ["unique id", comm.unique_id],
      ["part", comm.part && `${comm.part} of communicator ${comm.part_of}`],
      ["hosts", comm.hosts.join(", ")],
      ["device", comm.device],
      ["transport", [comm.transport, comm.transport_reason].filter(Boolean).join(": ")],
      ["strategy", String(comm.epoch)],
      ["done", `${count(comm.operations)} operations, ${bytes(comm.bytes)}; ${comm.failed} failed`],
      ["now", `${count(row.operations)} operations/s, ${byteRate(row.bytes)}`],
      ["kinds", comm.kinds.map((kind) => `${kind.collective} ${time(kind.exec_us / 1e6)}, ${kind.busbw_gbps.toFixed(2)} GB/s`).join("; ")],
      ["comes last", anywhere ?? here ?? "nobody"],
    ]));
    const most = Math.max(...comm.ranks.map((rank) => rank.enqueued), 0);
    this.ranks.show(comm.ranks.map((rank) => ({ ...rank, isBehind: row.still >= 2 && rank.enqueued < most })));
    const report = this.app.reports.get(comm.communicator);
    if (report && row.still >= 5) this.showReport(report);
  }

  async whyStuck() {
    const number = this.number;
    this.ask.disabled = true;
    say(this.told, "Asking its hosts…");
    try {
      const { stuck } = await get(`communicators/${number}/why-stuck`);
      if (number === this.number) {
        say(this.told, "");
        this.showReport(stuck);
      }
    } catch (error) {
      say(this.told, error.message);
    }
    this.ask.disabled = false;
  }

  showReport(report) {
    const text = JSON.stringify([report.class, report.culprits]);
    if (text === this.waits.dataset.shown) return;
    this.waits.dataset.shown = text;
    const hosts = report.hosts.filter(([, account]) => account).map(([host, account]) =>
      h("li", {}, `${host}: ${account.is_busy ? "too busy to say" : `${account.started} collectives started; ${account.is_running ? "runs" : "idle"}, nothing moved for ${account.idle_ms} ms`}`));
    this.waits.replaceChildren(
      h("h3", {}, `It ${verdict(report.class)}`),
      h("ul", { class: "troubles" }, report.culprits.map((one) => h("li", { class: "bad" }, culprit(one)))),
      h("ul", {}, hosts),
    );
  }

  async record() {
    const number = this.number;
    this.trace.disabled = true;
    say(this.told, "Recording…");
    try {
      const trace = await post(`trace?seconds=1&communicator=${number}`, null, true);
      const link = h("a", { href: URL.createObjectURL(trace), download: `mccs-${this.app.model.now.host}-${number}.json` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      say(this.told, `A trace of ${bytes(trace.size)} is saved; Perfetto (ui.perfetto.dev) opens it.`);
    } catch (error) {
      say(this.told, error.message);
    }
    this.trace.disabled = false;
  }
}
