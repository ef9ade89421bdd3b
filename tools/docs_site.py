"""What `make docs` adds to docs/: pictures drawn by our own report code, and the files that pages link to.

    <!-- picture: NAME -->     in a page: the picture of that name, drawn while the site is built (PICTURES)
    ](../path)                 in a page: a file of the repository; it becomes a page of the site

Hooks of mkdocs (mkdocs.yml names this file). On GitHub the pages read as they are, without the pictures.
"""

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megatron_cp as mcp  # noqa: E402
from examples import mask_gallery  # noqa: E402
from megatron_cp.plan.hardware.simulate import simulate_pass  # noqa: E402
from megatron_cp.report.draw.html import Figure  # noqa: E402
from megatron_cp.report.draw.style import picture_style_sheet_of  # noqa: E402
from megatron_cp.report.draw.svg import Markup, join, tag  # noqa: E402
from megatron_cp.report.figures.mask import mask_picture  # noqa: E402
from megatron_cp.report.figures.packs import dispatch_figure  # noqa: E402
from megatron_cp.report.figures.timeline import timeline_picture  # noqa: E402
from megatron_cp.report.figures.view import USUAL, USUAL_WORDS, view_of_pack  # noqa: E402
from megatron_cp.report.figures.workers import workers_figure  # noqa: E402

PICTURE = re.compile(r"<!-- picture: (\w+) -->")
# Links out of docs/; a line's number is dropped.
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)(?:#[\w-]+)?\)")
OTHER_WORKER = re.compile(r"https://unpkg\.com/iframe-worker/shim")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".cuh": "cuda", ".cu": "cuda"}
STYLE = """
.md-grid{max-width:1500px}.md-typeset table:not([class]){font-size:.62rem}
.md-typeset table:not([class]) th,.md-typeset table:not([class]) td{padding:.5em .8em;min-width:0}
.mcp{margin:1em 0;overflow-x:auto}.mcp svg{max-width:100%;height:auto}
.mcp .panels{display:flex;flex-wrap:wrap;gap:14px 3%}.mcp .panels>svg{flex:1 1 260px;max-width:48%}
.mcp .pair{display:flex;flex-wrap:wrap;gap:14px 3%;align-items:center}.mcp .pair>*{flex:1 1 260px}
.mcp .pair .panels>svg{max-width:100%}@media(max-width:600px){.mcp .panels>svg{max-width:100%}}
"""
# Material keeps the scheme that a reader chose; pictures follow it, and not the system's.
LIGHT, DARK = '[data-md-color-scheme="default"]', '[data-md-color-scheme="slate"]'

# The pack of the pictures: documents as they come, 32K tokens on four GPUs of an H100 node.
LENGTHS = (9000, 1200, 300, 14000, 41, 5000, 3227)
RANKS = 4
CONFIG = mcp.CPConfig(num_heads=32, num_kv_heads=32, head_dim=128)

# One causal document on eight machines with a GPU each: where the network is slow, it decides.
SLOW = mcp.Topology(
    name="eight machines, 10 GB/s", forward_tflops=500, backward_tflops=400, node_size=1,
    inner_gbytes_per_s=10, outer_gbytes_per_s=10, latency_us=10,
)  # fmt: skip
SLOW_CONFIG = mcp.CPConfig(num_heads=1, num_kv_heads=1, head_dim=128, topology=SLOW)


def on_files(files: Files, config: Any) -> Files:
    """Adds the style sheet of pictures, and every file of the repository that a page links to."""
    style = picture_style_sheet_of(LIGHT, DARK) + STYLE
    files.append(File.generated(config, "assets/pictures.css", content=style))
    named = {
        name
        for file in files.documentation_pages()
        for name in OUTSIDE.findall(Path(file.abs_src_path or "").read_text(encoding="utf-8"))
    }
    for name in sorted(named):
        files.append(File.generated(config, page_name(name), content=page_of_file(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns links out of docs/ into links of the site, and the names of pictures into pictures."""
    del config, files
    if page.file.src_uri.startswith("repository/"):
        return markdown
    markdown = OUTSIDE.sub(lambda found: f"]({page_name(found[1])})", markdown)
    return PICTURE.sub(lambda found: framed(PICTURES[found[1]]()), markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Returns the page with our own stand-in for workers; the plugin `offline` asks another server for one."""
    del config
    return OTHER_WORKER.sub(f"{'../' * page.url.count('/')}assets/file_search.js", output)


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """Returns the page of lost links with the same."""
    del template_name, config
    return OTHER_WORKER.sub("assets/file_search.js", output_content)


def page_name(path: str) -> str:
    """Returns where a file of the repository stands among the pages."""
    return str(PurePosixPath("repository", path).with_suffix("")) + (
        ".md" if path.endswith(".md") else f"{PurePosixPath(path).suffix.replace('.', '_')}.md"
    )


def page_of_file(path: Path) -> str:
    """Returns a file as a page: Markdown as it is but for its links, all else as code; a folder as a list."""
    title = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {title}\n\n" + "".join(f"- `{one.name}`\n" for one in sorted(path.iterdir()))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)
    return f"# {title}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def framed(drawn: Markup) -> str:
    """Returns a picture that stands in Markdown as one block of HTML."""
    return f'<div class="mcp">{" ".join(drawn.split())}</div>'


# ---------------------------------------------------------------------- pictures


@cache
def _plans() -> tuple[mcp.AttentionPlan, ...]:
    mask = mcp.mask.documents(LENGTHS, within="causal")
    names = ("auto", USUAL, "zigzag")
    return tuple(mcp.make_plan(mask, RANKS, replace(CONFIG, planner=name)) for name in names)


@cache
def _slow_plans() -> tuple[mcp.AttentionPlan, ...]:
    mask, names = mcp.mask.causal(65536), ("contiguous", "zigzag", "auto")
    return tuple(mcp.make_plan(mask, 8, replace(SLOW_CONFIG, planner=name)) for name in names)


def _drawing(figure: Figure | None) -> Markup:
    assert figure is not None
    return figure.picture


def _timeline(plans: Sequence[mcp.AttentionPlan]) -> Markup:
    runs = [simulate_pass(plan, "forward", num_traced=plan.cp_size) for plan in plans]
    words = {USUAL: f"{USUAL} ({USUAL_WORDS})"}
    names = [words.get(plan.planner, plan.planner) for plan in plans]
    return timeline_picture(list(zip(names, runs, strict=True)))


def _gallery() -> Markup:
    return join([_entry(make) for make in mask_gallery.GALLERY])


def _entry(make: Callable[[], mcp.AttentionMask]) -> Markup:
    """Returns one mask: its words, the line that makes it, its picture and who computes it."""
    plan = mcp.make_plan(make(), mask_gallery.NUM_RANKS, mask_gallery.CONFIG)
    pack = view_of_pack([plan])
    workers = workers_figure(pack)
    line = inspect.getsource(make).split("return ", 1)[1].strip()
    title = make.__name__.replace("_", " ")
    return join(
        [
            tag("h2", Markup(title), id=make.__name__),
            tag("p", Markup(inspect.getdoc(make) or "")),
            tag("pre", tag("code", Markup(line.replace("<", "&lt;")))),
            tag("div", mask_picture(pack), *([workers.picture] if workers else []), class_="pair"),
        ]
    )  # fmt: skip


PICTURES: dict[str, Callable[[], Markup]] = {
    "mask": lambda: mask_picture(view_of_pack(_plans()[:1], LENGTHS, ("causal",) * len(LENGTHS))),
    "workers": lambda: _drawing(workers_figure(view_of_pack(_plans()))),
    "dispatch": lambda: _drawing(dispatch_figure(view_of_pack(_plans()))),
    "timeline": lambda: _timeline(_plans()),
    "slow_workers": lambda: _drawing(workers_figure(view_of_pack(_slow_plans()))),
    "slow_timeline": lambda: _timeline(_slow_plans()),
    "gallery": _gallery,
}
