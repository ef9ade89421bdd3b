"""Colours and layout of every page: light and dark by the reader's system, one column when narrow.

Colour has three jobs, kept apart: a series or a rank (--s1 ...), a magnitude (--h0 ... --h8, one
hue), and everything else in ink.
"""

from megatron_cp.mask.draw import COLOURS

HEAT_STEPS = 9
NUM_SERIES = 8

_LIGHT = """
--page:#f4f4f1;--card:#fdfdfc;--ink:#14140f;--soft:#55544f;--muted:#6b6963;--grid:#e4e3dd;
--rule:#cfcec7;--good:#0a7d3c;--warn:#8f4f00;--bad:#b3261e;--link:#1d5fae;--shade:rgba(0,0,0,.28);--badge:#fff3d6;--doc-a:#2a78d6;--doc-b:#79aeea;
--s1:#2a78d6;--s2:#eb6834;--s3:#1baf7a;--s4:#eda100;--s5:#4a3aa7;--s6:#e87ba4;--s7:#008300;
--s8:#e34948;
--h0:#e9f1fb;--h1:#cde2fb;--h2:#a9cdf5;--h3:#86b6ef;--h4:#5f9fe6;--h5:#3987e5;--h6:#256abf;
--h7:#184f95;--h8:#0d366b;
"""
_DARK = """
--page:#0f0f0e;--card:#1a1a19;--ink:#f7f7f4;--soft:#c3c2b7;--muted:#a09e95;--grid:#2b2b29;
--rule:#403f3b;--good:#4cc27f;--warn:#f0b04a;--bad:#ff8a80;--link:#86b6ef;--shade:rgba(255,255,255,.35);--badge:#3a2e12;--doc-a:#3987e5;--doc-b:#24558f;
--s1:#3987e5;--s2:#d95926;--s3:#199e70;--s4:#c98500;--s5:#9085e9;--s6:#d55181;--s7:#2f9e2f;
--s8:#e66767;
--h0:#14202f;--h1:#10294a;--h2:#123a6b;--h3:#184f95;--h4:#1f63b6;--h5:#2a78d6;--h6:#5598e7;
--h7:#8fbdf1;--h8:#d3e6fc;
"""

_PICTURES = """
svg text{font-size:11.5px;fill:var(--soft);font-family:inherit}
svg .strong{fill:var(--ink);font-weight:600}svg .muted{fill:var(--muted)}svg .tiny{font-size:10px}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--rule);stroke-width:1}
.mean{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:3 3}
.frame{fill:none;stroke:var(--rule);stroke-width:1}.empty{fill:var(--page)}
.mask [fill-opacity="0.6"]{fill-opacity:.75}.mask [fill-opacity="0.9"]{fill-opacity:1}
.bar{fill:var(--doc-a)}.bar-quiet{fill:var(--doc-b)}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.faint{fill:none;stroke-width:1;opacity:.35}
.panel-title{margin:10px 0 2px;color:var(--ink);font-size:13px;line-height:1.35;font-weight:600}
.lanes{display:flex;padding-right:16px}.in-bar{display:none}
.heat{display:flex;gap:4px 12px;align-items:flex-start}.heat>svg{min-width:0;height:auto}
@media screen and (max-width:900px){.heat{flex-wrap:wrap}.heat>svg{flex-basis:100%!important}
.heat>svg:first-child text{font-size:16px}.heat>svg+svg{max-width:290px!important}
svg .in-bar{display:inline;fill:#fff}}
"""

_LAYOUT = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
header,nav,main,footer{max-width:1280px;margin:0 auto;padding-left:20px;padding-right:20px}
header{display:flex;flex-wrap:wrap;gap:4px 20px;align-items:baseline;padding-top:20px}
nav{position:sticky;top:0;z-index:1;background:var(--page);padding-top:8px;padding-bottom:8px}
nav ul{display:flex;flex-wrap:wrap;gap:2px 16px;list-style:none;margin:0;padding:0;font-size:13px}
a{color:var(--link)}
a:focus-visible,[tabindex]:focus-visible,summary:focus-visible{outline:2px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-9999px}.skip:focus{left:8px;top:8px;background:var(--card);padding:6px 10px;z-index:2}
.hidden{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
main>section{scroll-margin-top:44px}
h1{font-size:22px;line-height:1.25;margin:0;overflow-wrap:anywhere}
header p{margin:0;color:var(--soft)}
h2{font-size:17px;margin:26px 0 10px;font-weight:650}
h3{font-size:15px;margin:0 0 2px;font-weight:650}
.strip{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:12px;margin-bottom:12px}
.tile,figure,.note{background:var(--card);border:1px solid var(--grid);border-radius:10px}
.tile{padding:10px 14px}
.tile b{display:block;font-size:26px;line-height:1.2;font-weight:650;letter-spacing:-.01em}
.tile>span{display:block;color:var(--soft);font-size:13px}
.tile small{display:block;color:var(--muted);font-size:12px;line-height:1.4}
.row{display:grid;grid-template-columns:repeat(12,minmax(0,1fr));gap:12px;margin-bottom:12px}
.panels{display:flex;flex-wrap:wrap;gap:14px 34px}.panels>svg{flex:0 1 auto;min-width:0}
.says{margin:4px 0 0;min-height:1.5em;color:var(--soft);font-size:12.5px;font-variant-numeric:tabular-nums}
.rule{stroke:var(--ink);stroke-width:1;visibility:hidden}.rule[visibility=visible]{visibility:visible}
[data-chart]{cursor:crosshair;touch-action:pan-x pan-y}
.verdict{display:flex;flex-wrap:wrap;gap:6px 24px;align-items:baseline;margin-bottom:12px;padding:12px 16px;
background:var(--card);border:1px solid var(--grid);border-left:6px solid var(--good);border-radius:10px}
.verdict.look{border-left-color:var(--warn)}.verdict.ill{border-left-color:var(--bad)}
.verdict b{font-size:20px}.verdict ul{margin:0;padding:0;list-style:none;flex:1 1 420px;font-size:13.5px}
.verdict li{padding-left:1.5em;text-indent:-1.5em}
.verdict li::before{content:"✓";display:inline-block;width:1.5em;text-indent:0;color:var(--good);font-weight:700}
.verdict li.look::before{content:"!";color:var(--warn)}.verdict li.ill::before{content:"✗";color:var(--bad)}
.w4{grid-column:span 4}.w5{grid-column:span 5}.w6{grid-column:span 6}.w7{grid-column:span 7}
.w8{grid-column:span 8}.w12{grid-column:span 12}
figure{margin:0;padding:12px 14px;min-width:0;display:flex;flex-direction:column}
figcaption{color:var(--soft);font-size:13px;margin-bottom:8px}
.plot{overflow-x:auto;margin:auto 0}
.plot>svg{display:block;width:100%;height:auto;margin:0 auto}.plot>svg+svg{margin-top:14px}
details{margin-top:8px;font-size:12px;color:var(--muted)}
summary{cursor:pointer}
details .scroll{max-height:260px;overflow:auto;margin:6px 0 0}
pre{margin:0;width:max-content;min-width:100%;padding:8px;background:var(--page);border-radius:6px;
font:11.5px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;color:var(--soft)}
.badge{display:inline-block;background:var(--badge);color:var(--warn);border:1px solid currentColor;
border-radius:99px;padding:0 8px;font-size:11px;font-weight:600;line-height:17px;vertical-align:2px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-size:12px;font-weight:600;color:var(--muted);text-align:right;padding:5px 8px;vertical-align:bottom}
td{text-align:right;padding:5px 8px;border-top:1px solid var(--grid);white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead td{border-top:0}
tbody th{font-size:inherit;font-weight:400;color:inherit;border-top:1px solid var(--grid);white-space:nowrap}
tr.chosen td,tr.chosen th{font-weight:650}
td.why{text-align:left;color:var(--muted);white-space:normal}th.why{text-align:left}
.meter{display:inline-block;width:70px;height:8px;background:var(--page);
border-radius:2px;vertical-align:1px}
.meter i{display:block;height:8px;background:var(--doc-b);border-radius:2px}
.chosen .meter i{background:var(--doc-a)}
.facts{margin:8px 0 0;padding-left:18px;font-size:13.5px;color:var(--soft)}.facts li{margin:3px 0}
.bars{list-style:none;padding-left:0}.bars li{display:flex;gap:8px;align-items:baseline}.bars .meter{flex:none}
.facts+p{font-size:13.5px;color:var(--soft)}.meter.long{width:120px}
.text{margin:6px 0;white-space:pre-wrap;overflow-wrap:anywhere;color:var(--muted);
font:12.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace}.text mark{background:none;color:var(--ink);font-weight:600}
.text span,.text mark{unicode-bidi:isolate}.sample details{font-size:12.5px}
.note{padding:10px 14px;margin-bottom:12px;color:var(--soft);font-size:13px}
footer{margin-top:28px;padding-top:12px;padding-bottom:40px;border-top:1px solid var(--rule);
color:var(--soft);font-size:12.5px}
footer dl{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:2px 16px;margin:0}
footer dt{color:var(--muted)}footer dd{margin:0;overflow-wrap:anywhere}
code{font:12px ui-monospace,"DejaVu Sans Mono",monospace}
@media screen and (max-width:900px){.row>*{grid-column:1/-1}header,nav,main,footer{padding-left:10px;padding-right:10px}
.strip{grid-template-columns:repeat(2,minmax(0,1fr))}nav{position:static}
[data-chart] text{font-size:16px}th,td,tbody th{padding:4px 5px;font-size:12.5px}tbody th{white-space:normal;
min-width:104px}.scroll,.plot{background:linear-gradient(to right,var(--card) 30%,transparent),
linear-gradient(to right,transparent,var(--card) 70%) 100% 0,
radial-gradient(farthest-side at 0 50%,var(--shade),transparent),
radial-gradient(farthest-side at 100% 50%,var(--shade),transparent) 100% 0;background-repeat:no-repeat;
background-size:40px 100%,40px 100%,14px 100%,14px 100%;background-attachment:local,local,scroll,scroll}}
@media screen and (max-width:480px){th,td,tbody th{padding:4px 2px;font-size:12px}tbody th{min-width:0}}
@media print{@page{size:A4;margin:12mm}:root{color-scheme:light}body{background:#fff;font-size:11px}
nav,.skip,.says,details{display:none}figure,.tile,.verdict,tr{break-inside:avoid}h2{break-after:avoid}
.row>*{grid-column:1/-1}.plot,.scroll{overflow:visible}td .meter{display:none}
.strip{grid-template-columns:repeat(4,minmax(0,1fr))}*{print-color-adjust:exact}}
"""


def style_sheet() -> str:
    """Returns the page's only style sheet."""
    return picture_style_sheet() + _LAYOUT


def picture_style_sheet() -> str:
    """Returns what pictures alone need, for pages that have a layout of their own and follow the reader's system."""
    dark = "@media (prefers-color-scheme:dark)"
    return (
        f":root{{color-scheme:light dark;{_LIGHT}}}{dark}{{:root{{{_DARK}}}}}"
        f"{_PICTURES}{_marks()}{_numbers(_ON_LIGHT)}{dark}{{{_numbers(_ON_DARK)}}}"
    )


def picture_style_sheet_of(light: str, dark: str) -> str:
    """Returns the same for a site that chooses the scheme itself: selectors of what holds a light and a dark page."""
    return (
        f"{light}{{{_LIGHT}}}{dark}{{{_DARK}}}"
        f"{_PICTURES}{_marks()}{_numbers(_ON_LIGHT)}{_numbers(_ON_DARK, f'{dark} ')}"
    )


# Numbers in a cell: their colour up to a step of the heat, beyond, the step.
_ON_LIGHT = ("#14140f", "#fff", 5)
_ON_DARK = ("#fff", "#14140f", 6)


def _numbers(colours: tuple[str, str, int], within: str = "") -> str:
    """Returns the colours of numbers that stand in the cells of a heat map."""
    low, high, step = colours
    return "".join(
        f"{within}svg .t{i}{{fill:{low if i < step else high}}}" for i in range(HEAT_STEPS)
    )


def _marks() -> str:
    """Returns the colours of series, ranks, heat and documents, as the variables say."""
    series = "".join(
        f".s{i}{{fill:var(--s{i})}}.l{i}{{stroke:var(--s{i})}}" for i in range(1, NUM_SERIES + 1)
    )
    heat = "".join(
        f".h{i}{{fill:var(--h{i});shape-rendering:crispEdges}}" for i in range(HEAT_STEPS)
    )
    # A mask's drawing gives each document one of COLOURS; those are the ranks' here, so two tones.
    documents = "".join(
        f".mask [fill='{colour}']{{fill:var(--doc-{'ab'[i % 2]})}}"
        for i, colour in enumerate(COLOURS)
    )
    return series + documents + heat
