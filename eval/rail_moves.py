"""Reads traces of a service (`mccsctl trace`) for moves of rails: messages under way, and how busy
NICs are."""

import collections
import json
import re
import statistics

SENDS = re.compile(r"comm (\d+)\b.* channel \d+ sends ")
RANK = re.compile(r"comm (\d+)\b.* rank \d+$")


def under_way(spans):
    """Overlap of spans (begin, end): how many there are at a time while there are any, on average and at most, and for how long there are any."""
    steps = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    held = busy = count = most = before = 0
    for at, step in steps:
        if count > 0:
            held, busy = held + count * (at - before), busy + at - before
        count, before = count + step, at
        most = max(most, count)
    return {"mean": held / busy if busy else 0.0, "most": most, "busy_us": busy}


def read(path):
    """By communicator: spans of messages sent, with their bytes, and of moves that have ended. In microseconds."""
    events = json.load(open(path))["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    sends, moves = collections.defaultdict(list), collections.defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        track, args, end = tracks.get(event["tid"], ""), event["args"], event["ts"] + event["dur"]
        if event["name"] == "send" and (found := SENDS.match(track)):
            # A slice of a track begins when the one before it has ended: the message was posted earlier.
            sends[int(found[1])].append((args["posted_us"], end, args["bytes"]))
        elif "arrived_us" in args and "unfinished" not in args and (found := RANK.match(track)):
            moves[int(found[1])].append((args["arrived_us"], end, args["bytes"]))
    found = {comm: (sends[comm], moves[comm]) for comm in sends if moves[comm]}
    # Rails send as much each. The whole of the ranks is called, too, and sends little.
    sent = {comm: sum(bytes for _, _, bytes in of[0]) for comm, of in found.items()}
    return {comm: of for comm, of in found.items() if 16 * sent[comm] > max(sent.values())}


def summary(path, host_bytes_per_us, latency_us):
    """Times of rails: None where the trace has no moves of theirs.

    - `nic_busy`: bytes sent, of what the host's NICs carry from the first post to the last end;
    - `messages`, `moves`: of a rail, under way at a time;
    - `silent`: of that time, for which a rail has no message under way;
    - `move_us`: from when a rail's stream has come to a move until it is reported;
    - `rounds`: what a move takes beyond its bytes, in latencies of a NIC."""
    rails = read(path)
    if not rails:
        return None
    sends = [send for of_rail, _ in rails.values() for send in of_rail]
    took = max(end for _, end, _ in sends) - min(begin for begin, _, _ in sends)
    of_rail = [(under_way([span[:2] for span in sent]), under_way([span[:2] for span in moved])) for sent, moved in rails.values()]
    moves = [move for _, moved in rails.values() for move in moved]
    move_us, move_bytes = (statistics.median(of) for of in ([end - begin for begin, end, _ in moves], [move[2] for move in moves]))
    # A rail has an equal part of the NICs; a payload counts what all of its ranks contribute.
    wire_us = statistics.median(bytes for _, _, bytes in sends) * len(sends) / len(moves) / (host_bytes_per_us / len(rails))
    mean = lambda values: sum(values) / len(of_rail)
    return {"nic_busy": sum(bytes for _, _, bytes in sends) / host_bytes_per_us / took, "move_bytes": move_bytes,
            "messages": mean(sent["mean"] for sent, _ in of_rail), "messages_most": max(sent["most"] for sent, _ in of_rail),
            "moves": mean(moved["mean"] for _, moved in of_rail), "moves_most": max(moved["most"] for _, moved in of_rail),
            "silent": 1 - mean(sent["busy_us"] for sent, _ in of_rail) / took, "move_us": move_us,
            "rounds": max(0.0, move_us - wire_us) / latency_us}
