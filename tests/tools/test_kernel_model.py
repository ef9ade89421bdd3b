"""The model of machine code, on listings of a few lines whose cycles can be counted by hand."""

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

import tools.kernel_model.__main__ as command
from tools.kernel_model import disassemble, record
from tools.kernel_model.__main__ import OURS, joint_figures, known_variants, main, shape_of
from tools.kernel_model.issue import DeadlockError, Work, steady_state
from tools.kernel_model.kernels import Shape, figures, find_loops, ways_through
from tools.kernel_model.listing import read_listing
from tools.kernel_model.machine import DEFAULT, TIGHT, Machine
from tools.kernel_model.paths import NoWayError, best_way, loops

NONE = 7


def _listing(*lines):
    """Returns a listing as nvdisasm prints it; a line is (text, stall, waits, result board), or a label."""
    text, address = "", 0
    for line in lines:
        if isinstance(line, str) and line.startswith("."):
            text += f"{line}:\n"
            continue
        name, stall, waits, board = (line, 1, 0, NONE) if isinstance(line, str) else line
        control = stall | 1 << 4 | board << 5 | NONE << 8 | waits << 11
        text += f"        /*{address:04x}*/                   {name} ;    /* 0x{0:016x} */\n"
        text += f"                                             /* 0x{control << 41:016x} */\n"
        address += 16
    return read_listing(text)


def _idle(cycles):
    return [("NOP", 5, 0, NONE)] * (cycles // 5)


def _way(*lines):
    return tuple(_listing(*lines))


def _cycles(*ways, machine=DEFAULT, **facts):
    return steady_state(Work(tuple(ways), **facts), machine).cycles


def _product(a="gdesc[UR8]", last=True, columns=128):
    return f"HGMMA.64x{columns}x16.F32.BF16 R24, {a}, R24{', gsb0' if last else ''}"


# ---------------------------------------------------------------------- listings and ways


def test_a_line_of_nvdisasm_is_read_with_its_control_bits():
    (i,) = read_listing(
        "        /*0a50*/              @!P1 FFMA.FTZ R8, R8.reuse, R2, -R9 ;   /* 0x0000000208087223 */\n"
        "                                                                    /* 0x004fe20000010809 */\n"
    )
    assert (i.address, i.predicate, i.name, i.base) == (0xA50, "!P1", "FFMA.FTZ", "FFMA")
    assert i.operands == "R8, R8.reuse, R2, -R9"
    # 0x004fe200 >> 9 = 0x27f1: 1 | 1 << 4 | 7 << 5 | 7 << 8 | 0b000100 << 11
    assert (i.stall, i.result_board, i.read_board, i.waits) == (1, NONE, NONE, (2,))


def test_targets_are_labels_or_addresses():
    named = _listing("NOP", ".L_x_1", "NOP", "BRA `(.L_x_1)")
    plain = _listing("NOP", "NOP", "BRA 0x10")
    assert named[2].target == plain[2].target == 1


SPIN = (
    ".L_work",
    "MOV R0, R1",
    ".L_try",
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0], R1",
    "@!P0 BRA `(.L_try)",
    "FADD R1, R1, R2",
    "@P1 BRA `(.L_work)",
    "EXIT",
)


def test_waits_succeed_so_that_only_work_is_a_loop():
    (loop,) = loops(_listing(*SPIN))
    assert (loop.head, sorted(loop.body)) == (0, [0, 1, 2, 3, 4])


def test_the_best_way_is_the_best_of_all_ways():
    listing = _listing(
        "@P0 BRA `(.L_b)", "FADD R1, R1, R1", "FADD R1, R1, R1", ".L_b", "MUFU.EX2 R1, R1",
        "@P1 BRA `(.L_c)", "FSEL R1, R1, R1, P0", ".L_c", "NOP",
    )  # fmt: skip
    shortest = best_way(listing, 0, 6, lambda i: (-1,))
    most_adds = best_way(listing, 0, 6, lambda i: (i.base == "FADD", -(i.base == "FSEL")))
    assert [i.base for i in shortest] == ["BRA", "MUFU", "BRA"]
    assert [i.base for i in most_adds] == ["BRA", "FADD", "FADD", "MUFU", "BRA"]
    with pytest.raises(NoWayError, match=r"start=0x60 leads not to 0x0"):
        best_way(listing, 6, 0, lambda i: (-1,))


# ---------------------------------------------------------------------- cycles


def test_stalls_add_up_and_two_warps_fill_each_others():
    way = _way(("FADD R1, R1, R2", 4, 0, NONE), ("FADD R1, R1, R2", 6, 0, NONE))
    assert _cycles(way) == pytest.approx(10, abs=0.1)
    assert _cycles(way, way) == pytest.approx(10, abs=0.3)
    busy = _way(*["FADD R1, R1, R2"] * 10)
    assert _cycles(busy, busy) == pytest.approx(20, abs=0.3)


def test_exponentials_come_every_eight_cycles():
    assert _cycles(_way(*["MUFU.EX2 R1, R2"] * 5)) == pytest.approx(40, abs=0.5)


def test_who_waits_for_a_board_waits_for_the_latency():
    way = _way(("SHFL.BFLY R1, R1, 0x1", 1, 0, 3), ("FADD R1, R1, R2", 4, 1 << 3, NONE))
    assert _cycles(way) == pytest.approx(DEFAULT.shuffle_latency + 4, abs=0.1)


@pytest.mark.parametrize(
    ("a", "columns", "cycles"),
    [
        ("R8", 128, 64),  # 64 x 128 x 16 at 2048 multiply-adds a cycle
        ("gdesc[UR8]", 128, 64),  # 4 KB of B and 2 KB of A: 48 cycles at the port
        ("gdesc[UR8]", 32, 24),  # 1 KB and 2 KB at 128 bytes a cycle, against 16
    ],
)
def test_a_product_is_bound_by_the_tensor_cores_or_by_its_operands(a, columns, cycles):
    way = _way(*[_product(a, columns=columns)] * 4)
    assert _cycles(way, way) == pytest.approx(8 * cycles, abs=1)


def test_waiting_for_every_product_exposes_start_and_drain():
    way = _way(_product("R8"), "WARPGROUP.DEPBAR.LE gsb0, 0x0")
    for machine in (DEFAULT, TIGHT):
        expected = machine.product_start + 64 + machine.product_drain + 1
        assert _cycles(way, machine=machine) == pytest.approx(expected, abs=0.5)


def test_tma_takes_its_share_of_shared_memory():
    way = _way(*[_product(columns=32)] * 10)  # 240 cycles at the port
    assert _cycles(way, tma_bytes=60 * 128) == pytest.approx(240 + 60, abs=2)


@pytest.mark.parametrize("moves", ["STSM.16.MT88.4 [R2], R4", "LDSM.16.MT88.4 R4, [R2]"])
def test_matrices_move_sixteen_bytes_a_lane(moves):
    """Four warps of 32 lanes at 128 bytes a cycle."""
    assert _cycles(_way(*[moves] * 5)) == pytest.approx(5 * 16, abs=0.5)


def test_consumers_with_different_ways_meet_at_barriers():
    quick = _way("BAR.SYNC.DEFER_BLOCKING 0x1, 0x100", *_idle(5))
    slow = _way("BAR.SYNC.DEFER_BLOCKING 0x1, 0x100", *_idle(100))
    assert _cycles(quick, slow) == pytest.approx(101 + DEFAULT.barrier_latency, abs=2)
    told = _way("BAR.ARV 0x2, 0x100", *_idle(100))
    waits = _way("BAR.SYNC.DEFER_BLOCKING 0x2, 0x100", *_idle(5))
    assert _cycles(told, waits) == pytest.approx(101, abs=2)
    with pytest.raises(DeadlockError, match="all warps wait"):
        _cycles(waits, waits[:1] + _way("BAR.SYNC.DEFER_BLOCKING 0x3, 0x100"))


def test_consumers_take_turns():
    way = _way(
        "BAR.SYNC.DEFER_BLOCKING R3, 0x100", *_idle(50), "BAR.ARV R4, 0x100",
        *_idle(5),
    )  # fmt: skip
    turn = 51 + DEFAULT.barrier_latency
    assert _cycles(way, way, in_turn=True) == pytest.approx(2 * turn, abs=2)
    assert _cycles(way, way, way, in_turn=True) == pytest.approx(3 * turn, abs=2)


# ---------------------------------------------------------------------- kernels

KERNEL = (
    ".L_work",
    *_idle(100),
    _product(),
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    ".L_tile",
    _product("gdesc[UR8]", last=False),
    _product("R8"),
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "@P0 BRA `(.L_tile)",
    _product("R8"),
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
    "@P1 BRA `(.L_floats)",
    *["F2FP.BF16.F32.PACK_AB R1, R1, R2"] * 3,
    "STG.E R1, [R2]",
    "BRA `(.L_end)",
    ".L_floats",
    ("LDG.E R1, [R2]", 1, 0, 0),
    ("STG.E R1, [R2]", 1, 1, NONE),
    ".L_end",
    "@P2 BRA `(.L_work)",
    "EXIT",
)


def test_a_work_item_has_its_start_its_tiles_and_its_end():
    listing = _listing(*KERNEL)
    shape = Shape(False, 64, 16, 16, consumers=1)
    ways = ways_through(listing, shape)
    assert [len(way) for way in ways.full] == [4]
    sixteen, floats = ways.items["16 bits"][0], ways.items["accumulate"][0]
    for item in (sixteen, floats):  # four tiles of two products, of which one each is outside
        assert sum(i.base == "HGMMA" for i in item) == 8
    assert sum(i.base == "F2FP" for i in sixteen) == 3
    assert sum(i.base == "LDG" for i in floats) == 1 and not any(i.base == "F2FP" for i in floats)
    made = figures(ways, shape, DEFAULT)
    tile = DEFAULT.product_start + 2 * 64 + DEFAULT.product_drain + 2
    assert made.cycles == pytest.approx(tile, abs=1)
    assert made.utilisation == pytest.approx(16 / tile, abs=0.001)
    ends = 2 * (DEFAULT.product_start + 64 + DEFAULT.product_drain + 1) + 100 - tile
    assert made.fixed_cycles["16 bits"] == pytest.approx(ends + 10, abs=10)
    assert made.fixed_cycles["accumulate"] == pytest.approx(ends + DEFAULT.global_latency, abs=10)


def test_full_and_masked_tiles_are_two_ways_round_one_loop():
    listing = _listing(
        ".L_work", "NOP", ".L_tile", _product(), "@P0 BRA `(.L_full)", "R2P PR, R3, 0x7e",
        *["FSEL R1, R1, R2, P1"] * 39, ".L_full", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P2 BRA `(.L_tile)",
        "STG.E R1, [R2]", "@P3 BRA `(.L_work)", "EXIT",
    )  # fmt: skip
    shape = Shape(True, 8, 8, 8, consumers=1)
    ways = ways_through(listing, shape)
    assert [len(ways.full[0]), len(ways.masked[0])] == [4, 44]
    made = figures(ways, shape, Machine(product_start=0, product_drain=0))
    # The product alone, then 40 instructions at two cycles each behind it; 1.25 cycles of work.
    assert made.utilisation == pytest.approx(1.25 / 66, abs=0.001)
    assert made.masked_utilisation == pytest.approx(1.25 / 84, abs=0.001)


def test_where_the_last_consumer_has_a_loop_of_its_own_the_others_run_that_of_the_scores():
    gradients = (
        ".L_own", _product(columns=64), "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P0 BRA `(.L_own)",
    )  # fmt: skip
    scores = (
        ".L_tile", _product(), "@P0 BRA `(.L_full)", "R2P PR, R3, 0x7e", "FSEL R1, R1, R2, P1",
        ".L_full", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@P2 BRA `(.L_tile)",
    )  # fmt: skip
    for parts in ((gradients, scores), (scores, gradients)):  # whatever comes first in memory
        listing = _listing(*parts[0], *parts[1], "EXIT")
        ways = ways_through(listing, Shape(True, 8, 8, 8, consumers=3, separate_code=True))
        assert sorted(len(way) for way in ways.full) == [3, 4, 4]
        assert sorted(len(way) for way in ways.masked) == [3, 6, 6]


def test_a_listing_without_products_is_refused():
    with pytest.raises(ValueError, match="loops with products: 0, needed 1"):
        find_loops(_listing(*SPIN), 1)


def test_shapes_follow_from_the_variants():
    for name in OURS:
        variant = known_variants()[name]
        shape = shape_of(variant)
        assert shape.head_dim == int(name.split("_")[1])
        assert shape.is_backward == (not name.startswith("fwd"))
    assert Shape(False, 128, 128, 128).flops == 4 * 128**3
    assert Shape(True, 64, 128, 128).flops == 10 * 64 * 128 * 128
    # 192 with values of 128: S of 192 columns and P V of 128; dP and dV of 128, the others of 192.
    kinds = ("fwd", "dkdv", "dq", "bwd")
    narrow = [shape_of(known_variants()[f"{kind}_192_128"]) for kind in kinds]
    widths = [one.flops // (2 * one.block_m * one.block_n) for one in narrow]
    assert widths == [192 + 128, 2 * 192 + 2 * 128, 2 * 192 + 128, 3 * 192 + 2 * 128]
    assert narrow[0].tma_bytes == 128 * 2 * (192 + 128)
    assert narrow[3].tma_bytes == 64 * (2 * (192 + 128) + 4 * 192) and narrow[3].separate_code
    assert [shape_of(known_variants()[f"bwd_{dim}"]).consumers for dim in (64, 128)] == [3, 2]
    assert shape_of(known_variants()["dq_256"]).flops == 6 * 128 * 64 * 256
    assert shape_of(known_variants()["dkdv_256"]).flops == 8 * 64 * 64 * 256


def test_functions_of_an_elf_file_are_found_by_name():
    names = b"\0variable\0kernel_a\0kernel_b\0"
    symbols = b"".join(
        struct.pack("<IBBHQQ", at, info, 0, 0, 0, 0)
        for at, info in ((0, 0), (1, 1), (10, 0x12), (19, 0x12))
    )
    header = bytearray(64)
    names_at, symbols_at = 64, 64 + len(names)
    table_at = symbols_at + len(symbols)
    struct.pack_into("<Q", header, 0x28, table_at)
    struct.pack_into("<HH", header, 0x3A, 64, 3)
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, link, 0, 0, 0)
        for kind, at, size, link in (
            (0, 0, 0, 0), (3, names_at, len(names), 0), (2, symbols_at, len(symbols), 1)
        )
    )  # fmt: skip
    elf = bytes(header) + names + symbols + sections
    assert list(disassemble.functions(elf)) == [(2, "kernel_a"), (3, "kernel_b")]


def test_two_kernels_of_a_pass_are_judged_by_the_products_that_one_would_make():
    """Each at full speed: seven products in the time of seven, of which five are needed."""
    full = {"default": 1.0, "tight": 0.5}
    found = {"dkdv_256": full, "dq_256": full, "dkdv_64": full, "fwd_64": full}
    assert joint_figures(found) == {"bwd_256 in two": {"default": 0.714, "tight": 0.357}}


def test_kernels_that_do_not_exist_are_refused_with_those_that_do(capsys):
    with pytest.raises(SystemExit):
        main(["bwd_64_softcap"])  # it is two kernels
    told = capsys.readouterr().err
    assert "unknown kernel 'bwd_64_softcap'" in told
    assert "dkdv_64_softcap" in told


def test_the_record_is_of_todays_kernels():
    """Else: python -m tools.kernel_model --record, and the tables of docs/kernels.md."""
    assert record.stale(record.read(), known_variants()) == set()
    for one in record.read().values():  # nothing keeps tensor cores busy for longer than it takes
        assert 0 < max(one["default"], one["tight"], *one["masked"].values()) <= 1.0


def test_only_kernels_of_other_sources_or_of_another_compiler_are_modelled_anew(
    monkeypatch, tmp_path
):
    before = json.loads(record.PATH.read_text(encoding="utf-8"))
    path = tmp_path / "record.json"
    monkeypatch.setattr(record, "PATH", path)
    figures, variants = before["model, not measured"], known_variants()
    modelled = []

    def model(names):
        modelled.append(set(names))
        return {name: figures[name] for name in names}

    monkeypatch.setattr(command, "modelled", model)
    compiler = SimpleNamespace(name=before["compiler"])
    monkeypatch.setattr(command.compilers, "find_compiler", lambda kind: compiler)
    old = {**figures, "fwd_64": {**figures["fwd_64"], "default": 0.1, "source": "another"}}
    path.write_text(json.dumps({**before, "model, not measured": old}), encoding="utf-8")
    for wanted in ({"fwd_64"}, set(), set(variants)):
        assert main(["--record"]) == 0
        assert modelled.pop() == wanted
        after = json.loads(path.read_text(encoding="utf-8"))
        assert after == {**before, "compiler": compiler.name}
        if not wanted:
            compiler.name = "nvcc of another day"


ROWS = {
    "forward 64": "fwd_64", "forward 128": "fwd_128", "forward 256": "fwd_256", "backward 64": "bwd_64",
    "backward 128": "bwd_128", "backward 192": "bwd_192", "backward 192, values 128": "bwd_192_128",
    "backward 256": "bwd_256", "backward 256: dK and dV": "dkdv_256", "backward 256: dQ": "dq_256",
    "backward 64: dK and dV": "dkdv_64", "backward 64: dQ": "dq_64",
}  # fmt: skip


def test_the_page_quotes_the_record():
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text(encoding="utf-8")
    figures, seen = record.read(), 0
    for heading, feature in (
        ("loop", ""),
        ("with softcap", "_softcap"),
        ("with dropout", "_dropout"),
    ):
        table = page[page.index(f"| {heading}, default / tight (over masked tiles)") :].split(
            "\n\n"
        )[0]
        now = table.splitlines()[0].split("|").index(" now ")
        for line in table.splitlines()[2:]:
            name, told = line.split("|")[1].strip(), line.split("|")[now]
            told = [float(word) for word in re.findall(r"\d?\.\d+", told)]
            if name.endswith("of five products"):
                width = re.findall(r"\d+", name)[0] + feature
                pair = {one: figures[one] for one in (f"dkdv_{width}", f"dq_{width}")}
                found = joint_figures(pair)[f"bwd_{width} in two"]
                wanted = [found["default"], found["tight"]]
            else:
                found = figures[ROWS[name] + feature]
                wanted = [found["default"], found["tight"], *found["masked"].values()]
            assert told == wanted, line
            seen += 1
    assert seen == 20
