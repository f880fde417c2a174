"""The machine (free bytes, threads), and the settings that numbers depend on beside weights: precision, kernels, versions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import math
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from .blocks import quantised

T = TypeVar("T")
PACKAGES = ("torch", "transformers", "numpy")
SHARE = 0.5  # of the free memory may be planned for; the rest is left to what estimates do not know
ROOM = 1 << 30  # bytes of the machine's own memory that are planned for beside the weights at most, however much is free
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_EXACT = 1e-5  # of a product in float32, relative; bfloat16 is off by 2e-3
_DROP = 4  # MADV_DONTNEED of Linux
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def keep_freed() -> None:
    """Let this process keep the memory of freed tensors for the next ones (glibc).

    Tensors of megabytes are otherwise given back to the system one by one, and every page of the next one is cleared again:
    more time than many of the operations take that fill them. What is kept counts as this process's memory.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages, read at torch's first allocation
    try:
        tune = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return
    tune(_MMAP_THRESHOLD, 1 << 26)  # larger ones lie apart: kept, they do not fit into each other
    tune(_TRIM_THRESHOLD, 1 << 30)


def give_back() -> None:
    """Give the system what :func:`keep_freed` has kept, between phases whose tensors have other sizes."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class _Products:
    """How matrices of float32 are multiplied."""

    before: str | None = None  # torch's setting, while oneDNN multiplies


def quick_products() -> None:
    """Let torch multiply matrices of float32 by oneDNN where MKL uses half of the processor, until :func:`usual_products`.

    MKL has AVX-512 for Intel's processors alone: on AMD's oneDNN takes half of its time. torch asks oneDNN where bfloat16 is
    allowed for such products, and without AMX that has no quicker way than float32 itself. A product is looked at: where it is
    less exact than float32, all stays as it was.
    """
    settings = _settings()
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.backends.mkl.is_available()
    if settings is None or not wide or not _is_amd() or settings.fp32_precision not in ("none", "ieee"):
        return
    _Products.before, settings.fp32_precision = settings.fp32_precision, "bf16"
    x, y = (torch.randn(n, 512, generator=torch.Generator().manual_seed(n)) for n in (256, 384))
    exact = x.double() @ y.double().T
    if float((x @ y.T - exact).norm() / exact.norm()) > _EXACT:
        usual_products()


def usual_products() -> None:
    """Undo :func:`quick_products`."""
    if _Products.before is not None:
        _settings().fp32_precision, _Products.before = _Products.before, None


def _settings() -> Any:
    """Torch's settings of products by oneDNN, of torch 2.9 and later."""
    return getattr(torch.backends.mkldnn, "matmul", None)


@functools.cache
def _is_amd() -> bool:
    """Whether the processor is AMD's."""
    file = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (file.read_text() if file.is_file() else platform.processor())


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: sums come out the same whatever the number of threads is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_threads(work: Callable[[T], None], items: Sequence[T], workers: int | None = None) -> None:
    """Do many small things side by side, one thread each, where torch's own threads would find too little to share.

    There are as many ``workers`` as torch has threads by default; with one, or one item, nothing is started.
    """
    threads = torch.get_num_threads()
    workers = threads if workers is None else workers
    if workers < 2 or len(items) < 2:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        done = pool.map(work, items)
    torch.set_num_threads(threads)
    list(done)  # raises what a thread raised


def zeros_in_file(shape: Sequence[int], folder: Path | str | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros whose pages belong to a file and not to the process's own memory: the system writes them out where it needs room.

    The file has no name and goes with the tensor. Without a folder, and where open files cannot lose their names, they lie in
    ordinary memory.
    """
    if folder is None or os.name != "posix":
        return torch.zeros(tuple(shape), dtype=dtype)
    count = math.prod(shape)
    handle, name = tempfile.mkstemp(prefix="layerbudget-", dir=folder)
    try:
        os.ftruncate(handle, count * dtype.itemsize)
        return torch.from_file(name, shared=True, size=count, dtype=dtype).view(tuple(shape))
    finally:
        os.close(handle)
        Path(name).unlink()


def let_go(tensor: torch.Tensor, *, private: bool = False) -> None:
    """Let the pages of a tensor that lies in a file leave this process; they come back when they are read. For Linux alone.

    Tensors of :func:`zeros_in_file` lie in one; others stay as they are. A ``private`` mapping is for the caller to know: what
    was written into it would be lost.
    """
    held = private or (tensor.device.type == "cpu" and tensor.untyped_storage().filename is not None)
    if not held or not sys.platform.startswith("linux") or not tensor.is_contiguous():
        return
    page, start = mmap.PAGESIZE, tensor.data_ptr()
    first, last = -(-start // page) * page, (start + tensor.nbytes) // page * page
    if first < last:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DROP)


def free_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes that can be had on a device now: of the machine's memory, or of what its control group leaves of it."""
    place = torch.device(device)
    if place.type == "cuda":
        return int(torch.cuda.mem_get_info(place)[0])
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = next((path.read_text().strip() for path in _LIMITS if path.is_file()), "max")
    if limit.isdigit():
        free = min(free, max(int(limit) - int(psutil.Process().memory_info().rss), 0))
    return free


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of what computed the numbers; packages that are not installed are left out."""
    installed = {"python": platform.python_version()}
    for name in packages:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def computation(model: nn.Module) -> dict[str, Any]:
    """Precision and kernels in which a model computes: two runs that differ here are two measurements.

    ``attention`` and ``experts`` are implementations that transformers was told to use, ``matmul`` is torch's precision. The
    device itself is left out: kernels of one precision differ by rounding, as batch sizes do.
    """
    config, first = getattr(model, "config", None), next(model.parameters(), None)
    device = "cpu" if first is None else first.device.type
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return {
        "dtype": "+".join(kinds),
        "quantised": bool(quantised(model)),
        "attention": getattr(config, "_attn_implementation", None),
        "experts": getattr(config, "_experts_implementation", None),
        "autocast": str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else None,
        "matmul": "highest" if _Products.before else torch.get_float32_matmul_precision(),
    }
