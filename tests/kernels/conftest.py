"""A folder of kernels, and machines with compilers and a driver of any version."""

import json

import pytest

from megatron_cp.kernels import build, compilers
from megatron_cp.kernels import driver as driver_module


@pytest.fixture
def machine(monkeypatch):
    """Sets what compilers there are, and the driver's version."""

    def install(*found, driver=None):
        by_kind = {kind: tuple(c for c in found if c.kind == kind) for kind in ("nvcc", "nvrtc")}
        monkeypatch.setattr(compilers, "nvccs", lambda: by_kind["nvcc"])
        monkeypatch.setattr(compilers, "nvrtcs", lambda: by_kind["nvrtc"])
        monkeypatch.setattr(driver_module, "installed_version", lambda: driver)
        build.cubin.cache_clear()

    return install


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A folder of kernels with two variants of one source, and an empty cache."""
    sources = tmp_path / "it's, 50 % $HOME" / "kernels"  # where a user's folder may lie
    (sources / "include" / "mcp" / "ptx").mkdir(parents=True)
    (sources / "attn").mkdir()
    (sources / "attn" / "fwd.cu").write_text('#include <mcp/a.cuh>\n#include "params.h"\n')
    (sources / "attn" / "params.h").write_text("// parameters\n")
    (sources / "include" / "mcp" / "a.cuh").write_text("#pragma once\n#include <mcp/ptx/b.cuh>\n")
    (sources / "include" / "mcp" / "ptx" / "b.cuh").write_text("#include <mcp/a.cuh>\n")
    (sources / "include" / "mcp" / "other.cuh").write_text("// of another kernel\n")
    shared = {"pass": "forward", "source": "attn/fwd.cu", "entry": "tiny"}
    listed = [{"name": f"fwd_{d}", "defines": {"D": d}, **shared} for d in (64, 128)]
    (sources / "attn" / "variants.json").write_text(json.dumps({"variants": listed}))
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "PACKAGED", sources / "cubins")
    monkeypatch.setattr(build, "VARIANTS", sources / "attn" / "variants.json")
    monkeypatch.setattr(build, "INCLUDE_FOLDERS", (sources / "include", sources))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    build.variants.cache_clear()
    build.cubin.cache_clear()
    yield sources
    build.variants.cache_clear()
    build.cubin.cache_clear()
