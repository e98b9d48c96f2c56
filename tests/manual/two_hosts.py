"""Stage 04 over two hosts that are network namespaces: they share the files and nothing but a cable.

  python tests/manual/two_hosts.py RUN_DIR MODEL        # as root; a run with 02_states and 03_vocab

Trains into RUN_DIR/04_one_host and RUN_DIR/04_two_hosts (two processes each, gloo), kills one host of the second in
the middle and starts both again, and compares the weights. Exits with 1 when they differ.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOSTS = {"eagle3-a": "10.223.0.1", "eagle3-b": "10.223.0.2"}


def main(run_dir: Path, model: Path) -> int:
    """Train on both, with a host that dies, and compare with one host."""
    common = ["--run-dir", str(run_dir), "--model", str(model), "--epochs", "2", "--batch-tokens", "100",
              "--lr", "1e-3", "--validation-fraction", "0.2", "--save-every-steps", "1", "--log-every-steps", "1"]
    one, two = run_dir / "04_one_host", run_dir / "04_two_hosts"
    subprocess.run([sys.executable, ROOT / "04_train.py", *common, "--gpus", "2", "--out", one], check=True,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    cable()
    try:
        hosts = [start(number, [*common, "--out", str(two)]) for number in range(2)]
        while not list(two.glob("checkpoints/step_*")):
            time.sleep(0.1)
        hosts[1].kill()  # torchrun's workers end with it
        print("one host is dead; the other ends with", hosts[0].wait(timeout=300), flush=True)
        hosts = [start(number, [*common, "--out", str(two)]) for number in range(2)]
        codes = [host.wait(timeout=600) for host in hosts]
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False)
    names = ("model.safetensors", "trainer_state.safetensors")
    same = all((one / "checkpoints/last" / name).read_bytes() == (two / "checkpoints/last" / name).read_bytes()
               for name in names)
    print(f"exit codes {codes}; checkpoints are {'the same bytes' if same else 'DIFFERENT'}")
    return int(codes != [0, 0] or not same)


def cable() -> None:
    """Make two network namespaces with a pair of interfaces between them."""
    (first, address), (second, other) = HOSTS.items()
    for command in (f"netns add {first}", f"netns add {second}",
                    f"link add eth-e3 netns {first} type veth peer name eth-e3 netns {second}",
                    f"-n {first} addr add {address}/24 dev eth-e3", f"-n {second} addr add {other}/24 dev eth-e3",
                    *(f"-n {name} link set {device} up" for name in HOSTS for device in ("lo", "eth-e3"))):
        subprocess.run(["ip", *command.split()], check=True)


def start(number: int, arguments: list[str]) -> subprocess.Popen:
    """Start one host's torchrun in its namespace."""
    launcher = ["ip", "netns", "exec", [*HOSTS][number], sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                "--node-rank", str(number), "--nproc-per-node", "1", "--master-addr", HOSTS["eagle3-a"],
                "--master-port", "29511", "--local-addr", [*HOSTS.values()][number], str(ROOT / "04_train.py")]
    own = {"GLOO_SOCKET_IFNAME": "eth-e3", "OMP_NUM_THREADS": "1"}  # as --gpus 2 has on two cores: sums depend on it
    return subprocess.Popen([*launcher, *arguments], env=os.environ | own)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
