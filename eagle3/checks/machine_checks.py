"""Checks of the machine: GPUs and who is in the way there, code for them, ports, shared memory, disk, limits, clock."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from eagle3.checks.subject import Subject
from eagle3.common import machine
from eagle3.common.findings import FAIL, OK, WARN, Finding, said
from eagle3.common.log import size
from eagle3.engines import installed, launch

_SHARED_MEMORY = 4 << 30  # bytes; NCCL and the engines' workers pass tensors through it
_OPEN_FILES = 4096
_PROCESSES = 4096  # an engine of eight workers has about 2,000 threads
_HELD_SHARE = 0.05  # of a GPU's memory, above which somebody is in the way
_SKEW_S = 5.0
_BORN = datetime(2025, 1, 1, tzinfo=UTC).timestamp()  # a clock before that was never set


def _wanted(subject: Subject) -> str:
    """Return what wants so many GPUs, for a message."""
    return f"{'train.gpus' if subject.trains else 'tensor_parallel_size'} is {subject.engine.tensor_parallel_size}"


def check_gpus(subject: Subject) -> Iterator[Finding]:
    """GPUs are there, as many as are wanted, and nobody else holds them."""
    found, wanted = subject.gpus, subject.engine.tensor_parallel_size
    if not found:
        yield _without_gpus(subject, wanted)
        return
    names = ", ".join(sorted({f"{gpu.name} ({size(gpu.total_mib * machine.MIB)})" for gpu in found}))
    enough = len(found) >= wanted
    yield said(OK if enough else FAIL, "", f"{len(found)} × {names}, driver {found[0].driver}",
               "" if enough else f"{_wanted(subject)}; see CUDA_VISIBLE_DEVICES")
    for level, group in ((FAIL, found[:wanted]), (WARN, found[wanted:])):
        held = [gpu for gpu in group if gpu.used_mib > _spare_share(subject) * gpu.total_mib]
        if held:
            yield said(level, "gpu memory held", "; ".join(f"GPU {gpu.index}: {size(gpu.used_mib * machine.MIB)} in use"
                                                           for gpu in held) + _who(),
                       "wait for them, ask their owner, or choose other GPUs with CUDA_VISIBLE_DEVICES (nothing is "
                       "killed)")


def _without_gpus(subject: Subject, wanted: int) -> Finding:
    none = "no NVIDIA GPU is visible"
    if subject.trains:
        several = wanted > 1
        return said(WARN if several else OK, "", f"{none}: {wanted} process{'es' * several} will train on the CPU",
                    "see nvidia-smi and CUDA_VISIBLE_DEVICES")
    if wanted > 1:
        return said(FAIL, "", none, f"{_wanted(subject)}; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    if installed.is_for_cpus(subject.engine):
        return said(OK, "", f"{none}; the engine is a build for CPUs")
    return said(WARN, "", none, "the engine will run on the CPU, if it can")


def _spare_share(subject: Subject) -> float:
    """Return the share of a GPU's memory that others may hold: what the engine was told to leave, if it was told."""
    given = subject.argument("--gpu-memory-utilization", "--mem-fraction-static")
    try:
        return max(_HELD_SHARE, 1 - float(given or 1))
    except ValueError:
        return _HELD_SHARE


def _who() -> str:
    known = [f"pid {h.pid} of {h.user}, {size(h.used_mib * machine.MIB)}: {h.command}" for h in machine.holders()]
    return " by " + "; ".join(known) if known else " by processes that cannot be seen from here (another container?)"


def check_architecture(subject: Subject) -> Iterator[Finding]:
    """The engine's torch sees these GPUs, and it and vLLM have code for them."""
    if not subject.gpus:
        return
    torch = installed.torch_of(subject.engine)
    if not torch.sees_gpu:
        built = f"built for CUDA {torch.cuda}" if torch.cuda else "built for CPUs"
        yield said(FAIL, "", f"the engine's torch, {built}, sees no GPU; driver {subject.gpus[0].driver}",
                   "install a torch that this driver supports, or a newer driver; see CUDA_VISIBLE_DEVICES")
        return
    kernels = installed.kernel_architectures(subject.engine)
    for capability in sorted({gpu.capability for gpu in subject.gpus[: subject.engine.tensor_parallel_size]}):
        yield _code_for(capability, "the engine's torch", torch.architectures, "install a torch built for this GPU")
        if kernels:
            yield _code_for(capability, "vLLM", sorted(kernels), "install a vLLM built for this GPU", binaries=True)
        if capability[0] == 12:
            yield said(WARN, "blackwell sm120", "101,376 bytes of shared memory a block: kernels tuned for "
                       "data-centre GPUs can fail at long sequences or head sizes above 128",
                       "if one does, use smaller blocks or another attention backend in engine.args")
    if len(subject.gpus) > 2 and not machine.has_nvlink():
        yield said(WARN, "links", f"{len(subject.gpus)} GPUs without NVLink: vLLM has no custom all-reduce there",
                   "expect less speed-up from tensor parallelism; pipeline parallelism does not work with EAGLE-3")


def _code_for(capability: tuple[int, int], who: str, compiled: Sequence[str], fix: str,
              binaries: bool = False) -> Finding:
    """Say whether there is code for a GPU; with `binaries` PTX alone, which not all kernels have, is a warning."""
    told = f"compute capability {capability[0]}.{capability[1]}; {who} has code for "
    told += ", ".join(compiled) or "CPUs only"
    fits = {name for name in compiled if _runs(name, *capability)}
    if not fits:
        return said(FAIL, "", told, fix)
    if binaries and not any(name.startswith("sm_") for name in fits):
        return said(WARN, "", f"{told}: some kernels may be missing", fix)
    return said(OK, "", told)


def _runs(compiled: str, major: int, minor: int) -> bool:
    """Say whether code named sm_90 or compute_90 runs: binaries within a major version, PTX on anything newer."""
    kind, _, digits = compiled.rstrip("af").partition("_")
    if not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    return built <= (major, minor) and (kind == "compute" or built[0] == major)


def check_ports(subject: Subject) -> Iterator[Finding]:
    """The port that the engine is told to use is free; without one a free port is chosen at the start."""
    port = launch.given_port(subject.arguments)
    if port is None:
        return
    holder = machine.port_holder(port)
    if holder is None:
        yield said(OK, "port", f"{port} is free")
        return
    who = f"pid {holder.pid} of {holder.user}: {holder.command}" if holder.pid else "somebody not to be seen from here"
    yield said(FAIL, "port", f"{port} is held by {who}",
               "leave --port out of the engine's arguments, or attach to that server (nothing is killed)")


def check_shared_memory(subject: Subject) -> Iterator[Finding]:
    """Processes that share a model pass tensors through /dev/shm."""
    shared = machine.shared_memory()
    small = subject.engine.tensor_parallel_size > 1 and shared < _SHARED_MEMORY
    yield said(FAIL if small else OK, "", f"/dev/shm has {size(shared)}",
               "start the container with --shm-size 16g or --ipc host" if small else "")


def check_resources(subject: Subject) -> Iterator[Finding]:
    """Disk, open files, processes, clock."""
    free = size(machine.free_disk(subject.run_dir))
    yield said(OK, "disk", f"{free} free for {subject.run_dir}; each stage's --dry-run says what it needs")
    for name, limit, least, flag in (("open files", machine.open_file_limit(), _OPEN_FILES, "-n"),
                                     ("processes", machine.process_limit(), _PROCESSES, "-u")):
        few = 0 <= limit < least
        yield said(WARN if few else OK, name, f"limit {limit:,}" if limit >= 0 else "no limit",
                   f"ulimit {flag} 65536 before starting" if few else "")
    now, skew = datetime.now(UTC), machine.clock_skew(subject.run_dir)
    if now.timestamp() < _BORN:
        yield said(FAIL, "clock", f"it is said to be {now:%Y-%m-%d}", "set it: certificates and caches go by it")
    elif abs(skew) > _SKEW_S:
        yield said(WARN, "clock", f"the disk's clock is {skew:+.0f} s off", "run NTP on the file server")
    else:
        yield said(OK, "clock", f"{now:%Y-%m-%d %H:%M} UTC")
