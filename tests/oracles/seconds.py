"""Seconds of a plan, rank by rank and message by message, with dictionaries: the measure of prices.

Only plain numbers of plans, topologies and configs are read; no code of the package takes part.
"""


def row_sizes(options, pass_name, degree):
    """Bytes of a query and a key row there and back, from the tensors that travel."""
    heads, kv_heads = options.num_heads // degree, max(1, options.num_kv_heads // degree)
    dim, size = options.head_dim, options.element_bytes
    if pass_name == "forward":  # q there, out and lse back in fp32; k and v there
        return {
            "q": (heads * dim * size, heads * (dim + 1) * 4),
            "k": (2 * kv_heads * dim * size, 0),
        }
    query = heads * 2 * dim * size + 2 * heads * 4  # q, dout, lse, delta
    return {
        "q": (query, heads * dim * 4),
        "k": (2 * kv_heads * dim * size, 2 * kv_heads * dim * 4),
    }


def levels_of(topology):
    """Returns (ranks of a group, GB/s of one rank out of it, latency in us), nodes first."""
    levels = [(topology.node_size, topology.outer_gbytes_per_s, topology.latency_us)]
    for level in topology.outer_levels:
        latency = levels[-1][2] if level.latency_us is None else level.latency_us
        levels.append((level.size, level.gbytes_per_s, latency))
    return levels


def hop_seconds(messages, row_bytes, topology):
    """Returns {rank: seconds} in which ranks send, in which they receive, and {rank: latency in s} of receivers."""
    levels, moved, latency = levels_of(topology), {}, {}
    for src, dst, start, stop in messages:
        left = [size for size, _, _ in levels if src // size != dst // size]
        wait = max([topology.latency_us] + [us for size, _, us in levels if size in left]) * 1e-6
        latency[dst] = max(latency.get(dst, 0.0), wait)
        for rank, way in ((src, "out"), (dst, "in")):
            links = [(rank, way, size) for size in left] or [(rank, way, "inside")]
            if left:
                links.append((rank // topology.node_size, way, "all ports"))
            for link in links:
                moved[link] = moved.get(link, 0.0) + (stop - start) * row_bytes

    def seconds(rank, way):
        times = [moved.get((rank, way, "inside"), 0.0) / topology.inner_gbytes_per_s]
        times += [moved.get((rank, way, size), 0.0) / rate for size, rate, _ in levels]
        if topology.nics_per_node and (rank, way, topology.node_size) in moved:
            ports = topology.nics_per_node * topology.outer_gbytes_per_s
            times.append(moved[rank // topology.node_size, way, "all ports"] / ports)
        return max(times) / 1e9

    sent = {src: seconds(src, "out") for src, *_ in messages}
    received = {dst: seconds(dst, "in") for _, dst, *_ in messages}
    return sent, received, latency


def exchange_seconds(plan, pass_name, topology):
    """Returns what exchanging tokens against heads takes, there and back."""
    split, options = plan.get_pass(pass_name).head_split, plan.config
    degree = len(split.groups[0]) if split else 1
    if degree == 1:
        return 0.0
    keys = max(options.num_kv_heads, degree) * 2
    rows = 2 * options.num_heads + keys  # q and out, k and v
    if pass_name == "backward":
        rows = 3 * options.num_heads + 2 * keys  # q, dout, dq; k, v, dk, dv
    row_bytes = rows * options.head_dim * options.element_bytes
    row_bytes += 4 * options.num_heads * (2 if pass_name == "backward" else 1)  # lse, delta
    if pass_name == "backward" and degree > options.num_kv_heads:
        wider = 4 - options.element_bytes  # dk and dv of copied heads are added up in fp32
        row_bytes += 2 * degree * options.head_dim * wider
    sent = len(plan.global_from_local[0]) * row_bytes * (degree - 1) / degree
    crossed = [
        (rate, latency)
        for size, rate, latency in levels_of(topology)
        if any(len({rank // size for rank in group}) > 1 for group in split.groups)
    ]
    if not crossed:
        return sent / (topology.inner_gbytes_per_s * 1e9) + 2e-6 * topology.latency_us
    rates = [rate for rate, _ in crossed]  # nothing of it is taken to stay inside
    if topology.nics_per_node:
        sharing = min(topology.node_size, len(plan.global_from_local))
        rates.append(topology.nics_per_node * topology.outer_gbytes_per_s / sharing)
    return sent / (min(rates) * 1e9) + 2e-6 * crossed[-1][1]


def compute_seconds(plan, pass_name, topology):
    """Returns `[stages][P]`: pairs counted from slices, at the rate of the topology times the rank's speed."""
    options, pass_ = plan.config, plan.get_pass(pass_name)
    degree = len(pass_.head_split.groups[0]) if pass_.head_split else 1
    flops, rate = 4.0 * options.num_heads * options.head_dim / degree, topology.forward_tflops
    if pass_name == "backward":
        flops, rate = flops * 2.5, topology.backward_tflops
    ranks = range(len(plan.global_from_local))
    speeds = options.rank_speeds or topology.rank_speeds or [1.0 for _ in ranks]
    return [
        [_pairs(stage.work[rank].array) * flops / (rate * 1e12 * speeds[rank]) for rank in ranks]
        for stage in pass_.stages
    ]


def _pairs(slices):
    total = 0
    for q_start, q_end, k_start, k_end, lo, hi in slices.tolist():
        for q in range(q_start, q_end):
            total += max(0, min(k_end, q + hi + 1) - max(k_start, q + lo))
    return total


def predicted_seconds(plan, pass_name, topology):
    """Returns the predicted time of the slowest rank: in every stage the larger of compute and what travels."""
    pass_ = plan.get_pass(pass_name)
    stages, ranks = pass_.stages, range(len(plan.global_from_local))
    sizes = row_sizes(
        plan.config, pass_name, len(pass_.head_split.groups[0]) if pass_.head_split else 1
    )
    under = [[0.0 for _ in ranks] for _ in stages]
    exposed = [0.0 for _ in ranks]
    for side in "qk":
        chain = [0.0 for _ in ranks], 0.0  # seconds per byte of the rows held, and latency
        for index, stage in enumerate(stages):
            per_byte, latency = _per_byte(getattr(stage, f"{side}_cast"), ranks, topology)
            there, back = sizes[side]
            if not getattr(stage, f"keeps_{side}"):
                chain = [0.0 for _ in ranks], 0.0
            chain = [a + b for a, b in zip(chain[0], per_byte, strict=True)], chain[1] + latency
            is_last = index + 1 == len(stages)
            goes_home = is_last or not getattr(stages[index + 1], f"keeps_{side}")
            for rank in ranks:
                arrives = per_byte[rank] * there + latency
                leaves = (chain[0][rank] * back + chain[1]) if goes_home and back else 0.0
                if index:
                    under[index - 1][rank] += arrives
                else:
                    exposed[rank] += arrives
                if is_last:
                    exposed[rank] += leaves
                else:
                    under[index + 1][rank] += leaves
    total = list(exposed)
    for compute, moving in zip(compute_seconds(plan, pass_name, topology), under, strict=True):
        for rank in ranks:
            total[rank] += max(compute[rank] + topology.contention * moving[rank], moving[rank])
    return max(total) + exchange_seconds(plan, pass_name, topology)


def _per_byte(transfer, ranks, topology):
    """Returns each rank's seconds for rows of one byte, hop after hop, and the latency of the hops."""
    total, latency = [0.0 for _ in ranks], 0.0
    for hop in transfer.hops if transfer else ():
        sent, received, waits = hop_seconds(hop.messages.tolist(), 1.0, topology)
        total = [
            one + max(sent.get(r, 0.0), received.get(r, 0.0))
            for one, r in zip(total, ranks, strict=True)
        ]
        latency += max(waits.values(), default=0.0)
    return total, latency
