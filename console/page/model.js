// What is known: two looks at the service, from which rates come, and the cluster as its controller tells of it.

const seconds = (ns) => ns / 1e9;

function rateOf(now, before, took) {
  return before == null || took == null || now < before ? null : (now - before) / took;
}

function byKey(list, key) {
  return new Map((list ?? []).map((one) => [key(one), one]));
}

// The upper bound of the bucket in which a share of durations lies; buckets are powers of two of microseconds.
function quantile(buckets, share) {
  const total = buckets.reduce((sum, count) => sum + count, 0);
  if (total === 0) return null;
  const wanted = Math.max(1, Math.ceil(total * share));
  let soFar = 0;
  const at = buckets.findIndex((count) => (soFar += count) >= wanted);
  return 2 ** Math.min(at, 25) / 1e6;
}

export class Model {
  constructor() {
    Object.assign(this, { now: null, before: null, cluster: null, clusterBefore: null, policy: null, stuck: null, failed: [], away: null });
    this.still = new Map();
    this.clusterAt = 0;
    this.clusterTook = null;
  }

  // A look at the service.
  look(overview) {
    const isAnother = this.now && (overview.at_ns < this.now.at_ns || overview.host !== this.now.host);
    this.before = isAnother ? null : this.now;
    this.now = overview;
    if (isAnother) this.still.clear();
    this.took = this.before ? Math.max(1e-3, seconds(overview.at_ns - this.before.at_ns)) : null;
    this.watchStanding();
    this.communicators = this.communicatorRows();
  }

  lookAtCluster(cluster, at) {
    this.clusterBefore = this.cluster;
    this.clusterTook = this.clusterAt ? (at - this.clusterAt) / 1000 : null;
    [this.cluster, this.clusterAt] = [cluster, at];
    if (this.now) this.communicators = this.communicatorRows();
  }

  // Since when communicators with work have not moved.
  watchStanding() {
    const seen = new Set();
    for (const comm of this.now.communicators) {
      const moved = comm.operations + comm.bytes + (comm.puts ?? 0) + comm.ranks.reduce((sum, rank) => sum + rank.started + rank.completed, 0);
      const hasWork = comm.ranks.some((rank) => rank.enqueued > rank.completed);
      const known = this.still.get(comm.communicator);
      seen.add(comm.communicator);
      if (!hasWork || known?.moved !== moved) this.still.set(comm.communicator, { moved, since: this.now.at_ns, hasWork });
    }
    for (const number of this.still.keys()) if (!seen.has(number)) this.still.delete(number);
  }

  stillSeconds(comm) {
    const known = this.still.get(comm.communicator);
    return known?.hasWork ? seconds(this.now.at_ns - known.since) : 0;
  }

  // Communicators of this host in full, and those of others as the cluster tells of them.
  communicatorRows() {
    const before = byKey(this.before?.communicators, (comm) => comm.communicator);
    const rows = this.now.communicators.map((comm) => {
      const then = before.get(comm.communicator);
      const busy = then ? seconds(comm.busy_ns - then.busy_ns) : 0;
      return {
        comm,
        key: `${comm.communicator}`,
        number: comm.communicator,
        name: comm.name ?? "",
        tenant: comm.tenant,
        job: comm.job ?? "",
        where: comm.hosts.length ? `${comm.hosts.length} hosts` : this.now.host,
        nranks: comm.nranks,
        operations: rateOf(comm.operations, then?.operations, this.took),
        bytes: rateOf(comm.bytes, then?.bytes, this.took),
        busBandwidth: busy > 0 ? (comm.bus_bytes - then.bus_bytes) / busy : null,
        busy: then ? Math.min(1, busy / this.took) : null,
        failed: comm.failed,
        last: this.comesLast(comm, then),
        still: this.stillSeconds(comm),
      };
    });
    return rows.concat(this.otherRows(new Set(this.now.communicators.map((comm) => comm.unique_id))));
  }

  otherRows(known) {
    const before = new Map();
    for (const { host, summary } of this.clusterBefore?.hosts ?? []) {
      for (const comm of summary?.communicators ?? []) before.set(`${host}/${comm.communicator}`, comm.operations);
    }
    const rows = [];
    for (const { host, summary } of this.cluster?.hosts ?? []) {
      for (const comm of summary?.communicators ?? []) {
        if (known.has(comm.unique_id)) continue;
        const key = `${host}/${comm.communicator}`;
        const operations = rateOf(comm.operations, before.get(key), this.clusterTook);
        const where = comm.hosts > 1 ? `${comm.hosts} hosts, from ${host}` : host;
        rows.push({ summary: comm, host, key, number: comm.communicator, name: "", tenant: comm.tenant, job: "", where, nranks: comm.nranks, operations, bytes: null, busBandwidth: null, busy: null, failed: null, last: null, still: 0 });
      }
    }
    return rows;
  }

  // The rank of this host that comes last, and by how much on average since the look before.
  comesLast(comm, then) {
    const before = byKey(then?.ranks, (rank) => rank.rank);
    let last = null;
    for (const rank of comm.ranks) {
      const old = before.get(rank.rank);
      const [started, late] = [rank.started - (old?.started ?? 0), rank.late_ns - (old?.late_ns ?? 0)];
      if (started > 0 && late > 0 && (last === null || late / started > last.ns)) last = { rank: rank.rank, ns: late / started };
    }
    return last;
  }

  tenantRows() {
    const before = byKey(this.before?.tenants, (tenant) => tenant.tenant);
    return this.now.tenants.map((tenant) => {
      const then = before.get(tenant.tenant);
      const quota = (name) => tenant.quotas.find((one) => one.resource === name);
      const memory = quota("memory_bytes");
      const old = byKey(then?.kinds, (kind) => kind.collective);
      const buckets = [];
      for (const kind of tenant.kinds) {
        kind.durations.buckets.forEach((count, at) => {
          buckets[at] = (buckets[at] ?? 0) + count - (old.get(kind.collective)?.durations.buckets[at] ?? 0);
        });
      }
      return {
        tenant: tenant.tenant,
        quotas: tenant.quotas,
        sessions: quota("sessions")?.used ?? 0,
        communicators: tenant.communicators,
        memory: memory?.used ?? 0,
        memoryPart: memory ? memory.used / Math.max(1, memory.limit) : 0,
        inFlight: tenant.in_flight,
        operations: rateOf(tenant.operations, then?.operations, this.took),
        bytes: rateOf(tenant.bytes, then?.bytes, this.took),
        weight: tenant.allotment?.weight_milli == null ? null : tenant.allotment.weight_milli / 1000,
        flowCap: tenant.allotment?.flow_cap_bps ?? null,
        hostCap: tenant.allotment?.host_cap_bps ?? null,
        allotted: tenant.allotment?.allotted_bps ?? null,
        p50: quantile(buckets, 0.5),
        p99: quantile(buckets, 0.99),
        failed: tenant.failed,
      };
    });
  }

  hostRows() {
    const told = byKey(this.cluster?.hosts, (host) => host.host);
    const seen = byKey(this.now.hosts, (host) => host.host);
    const names = new Set([...seen.keys(), ...told.keys()]);
    if (names.size === 0) names.add(this.now.host);
    const [sends, receives] = [new Map(), new Map()];
    const add = (to, host, bps) => to.set(host, (to.get(host) ?? 0) + bps);
    for (const { from, to, bps } of this.policy?.rates.paths ?? []) {
      add(sends, from, bps);
      add(receives, to, bps);
    }
    return [...names].map((name) => {
      const [own, { summary, trouble } = {}] = [seen.get(name), told.get(name)];
      const isOwn = own ? own.own : name === this.now.host;
      const communicators = summary ? summary.communicators.length + summary.more_communicators : isOwn ? this.now.communicators.length : null;
      return {
        host: name,
        isUp: own ? own.up : summary != null || isOwn,
        since: own?.since_seconds ?? null,
        address: own?.address ?? "",
        version: summary?.version ?? (isOwn ? this.now.version : ""),
        sessions: summary?.sessions ?? null,
        communicators,
        gpus: summary?.gpus ?? (isOwn ? this.now.gpus?.length ?? 0 : null),
        sends: this.policy ? sends.get(name) ?? 0 : null,
        receives: this.policy ? receives.get(name) ?? 0 : null,
        certificate: summary?.certificate_end == null ? null : summary.certificate_end - Date.now() / 1000,
        remarks: this.remarks(own, summary, trouble),
      };
    });
  }

  remarks(own, summary, trouble) {
    const all = [];
    if (own && !own.up) all.push(own.last_error ?? "not reached yet");
    if (trouble && !all.includes(trouble)) all.push(trouble);
    if (summary?.draining) all.push(`drained${summary.draining_reason ? `: ${summary.draining_reason}` : ""}`);
    if (summary?.unreachable.length) all.push(`cannot reach ${summary.unreachable.join(", ")}`);
    for (const lost of summary?.gpus_lost ?? []) all.push(`lost ${lost}`);
    return all.join("; ");
  }

  pathRows() {
    const key = (path) => `${path.sends} ${path.peer} ${path.path}`;
    const before = byKey(this.before?.paths, key);
    return this.now.paths.map((path) => {
      const then = before.get(key(path));
      const segments = path.segments - (then?.segments ?? 0);
      return {
        key: key(path),
        peer: path.peer,
        direction: path.sends ? "to" : "from",
        path: path.path,
        flows: path.flows,
        bytes: rateOf(path.bytes, then?.bytes, this.took),
        total: path.bytes,
        roundTrip: path.round_trip_us == null ? null : path.round_trip_us / 1e6,
        loss: segments > 0 ? (path.retransmits - (then?.retransmits ?? 0)) / segments : null,
      };
    });
  }

  linkRows() {
    const rates = this.policy?.rates.links ?? [];
    const rows = rates.map(({ from, to, bps, capacity_bps }) => ({ key: `${from} ${to}`, from, to, bps, capacity: capacity_bps, state: "" }));
    for (const [lower, upper, state] of this.policy?.links ?? []) {
      rows.push({ key: `${lower} ${upper} !`, from: lower, to: upper, bps: null, capacity: null, state: typeof state === "string" ? state : JSON.stringify(state) });
    }
    for (const [lower, upper, why] of this.policy?.dead_links ?? []) {
      rows.push({ key: `${lower} ${upper} +`, from: lower, to: upper, bps: null, capacity: null, state: `found dead, ${why} over it` });
    }
    return rows;
  }
}
