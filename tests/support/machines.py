"""Several "machines" on this one: each with a network, processes, a host name, a home, a /tmp and a
/dev/shm of its own, and an sshd; they and a desk, where their user sits, hang on one switch.

The desk's namespaces hold those of the machines. So none of its addresses, ports and interfaces is
seen outside, two such networks at once do not meet, and nothing inside can end a process outside,
not by name either (`ray stop`). When the desk's first process ends, the kernel ends everything
else; and it ends with the test's process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

import tpengine
from support.namespaces import KINDS, UNSHARE, children_of, namespace, processes_in
from support.system_packages import require
from support.waiting import wait_until

_SUBNET = "10.77.0"
"""Of the desk's own network, so it does not matter who else uses it."""
_DESK_ADDRESS = f"{_SUBNET}.254"
_START_S = 60.0
_END_S = 30.0
_LOG_CHARACTERS = 3000

_OWN_WORLD = """
set -e
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=755 tmpfs /var/log  # sshd notes there who logs in
mkdir /run/sshd
touch /run/utmp /var/log/lastlog
for path in {visible}; do
  mkdir -p {own}$path
  mount --bind $path {own}$path
done
mount --rbind {own}/tmp /tmp
mount --bind {own}/home {folder}/home
for file in {folder}/etc/*; do
  target=/etc/$(basename $file)
  if [ -e $target ]; then mount --bind $file $target; fi
done
echo {name} > /proc/sys/kernel/hostname
ip link set lo up
"""
_DESK = """
ip link add switch type bridge
ip addr add {address}/24 dev switch
ip link set switch up
touch {own}/ready
read -r _ || true  # until the test's end of the pipe is closed
"""
_MACHINE = """
for _ in $(seq 500); do
  if ip link show eth0 >/dev/null 2>&1; then break; fi
  sleep 0.02
done
ip addr add {address}/24 dev eth0
ip link set eth0 up
ip route add default via {desk_address}
touch {own}/ready
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin {sshd} -D -e -f {folder}/sshd_config
"""
_SSHD_CONFIG = """
Port 22
HostKey {folder}/host_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PidFile none
MaxStartups 100
"""
_ETC = {
    "passwd": "root:x:0:0:root:{folder}/home:/bin/bash\n"
    "sshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n",
    "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
    "resolv.conf": "",  # no name server, so no look-up waits for one
}


class Machines:
    """A context in which `size` machines run; nothing of them is left after it, come what may.

    `~` of root is the same path on all machines and the desk, and everywhere another folder. root
    may log in from any of them to any machine. In every shell this Python and its `ray` are on
    PATH and this tree's tpengine can be imported. Apart from that the file system is this one's.

    Skips the test, or fails it where the tools are required, unless we are root on a Linux that
    lets us make namespaces.

    Args:
        environment: variables of every shell.
        visible: folders below /tmp that the machines are to see, too.

    Attributes:
        addresses: IPv4 address of each machine.
        home: what `~` is on all of them.
    """

    def __init__(
        self,
        size: int,
        environment: Mapping[str, str] | None = None,
        visible: Iterable[Path] = (),
    ) -> None:
        self._sshd = _require_tools()
        self.addresses = [f"{_SUBNET}.{machine + 1}" for machine in range(size)]
        self._environment = dict(environment or {})
        self._visible = list(visible)
        self._started: list[subprocess.Popen[bytes]] = []
        self._first: dict[str, int] = {}  # the first process of each, by its number out here
        self._namespaces: set[str] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="machines", dir="/tmp"))
        self.home = self._folder / "home"

    def __enter__(self) -> Machines:
        try:
            self._write_files()
            self._start(None, [*UNSHARE], depth=1)
            self._wait_until_ready(None)
            for machine in range(len(self.addresses)):
                self._start_machine(machine)
            for machine in range(len(self.addresses)):
                self._wait_for_ssh(machine)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            print(self.logs())
        self.close()

    def run(
        self, machine: int | None, command: str, timeout_s: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        """Runs a shell's command line in the home of a machine, or of the desk (None); it needs no
        network.

        stdout holds stderr, too. A command that takes longer is ended; the return code is 124.
        """
        return subprocess.run(
            self.command(machine, command, timeout_s),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s + _END_S,
            check=False,
        )

    def command(self, machine: int | None, command: str, timeout_s: float) -> list[str]:
        """What `run` runs, for a `Popen` that lives as long as the test."""
        clean = ["env", "-i", f"HOME={self.home}", "USER=root", "LANG=C.UTF-8", "TERM=dumb"]
        return [
            *self._enter(machine, *KINDS),
            *(*clean, "PATH=/usr/sbin:/usr/bin:/sbin:/bin"),
            *("timeout", "--kill-after=1", str(timeout_s)),
            *("bash", "-c", f"source ~/.bashrc; cd; {command}"),
        ]

    def folder_of(self, machine: int | None, name: str) -> Path:
        """Where `home` or `tmp` of a machine or the desk lies, seen from out here."""
        return self._own(machine) / name

    def cut(self, machine: int) -> None:
        """Cuts the machine's link: no packet passes, and no peer is told."""
        self._call(*self._enter(None, "net"), "ip", "link", "set", _name(machine), "down")

    def kill(self, machine: int) -> None:
        """Ends all processes of the machine at once; no peer is told."""
        self.cut(machine)
        first = self._first.pop(_name(machine))
        inside = namespace(first, "pid")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: inside is None or not processes_in([inside]), _END_S, f"{machine} lives")

    @property
    def namespaces(self) -> set[str]:
        """All that were made for the desk and the machines."""
        return set(self._namespaces)

    def logs(self) -> str:
        """The ends of what the desk's and the machines' first processes wrote."""
        logs = []
        for path in sorted(self._folder.glob("*/log")):
            text = path.read_text(errors="replace")[-_LOG_CHARACTERS:].rstrip()
            logs.append(f"--- log of {path.parent.name}\n{text}")
        return "\n".join(logs)

    def close(self) -> None:
        """Ends every process, and so every interface and mount; a second call does nothing."""
        first = self._first.pop(_name(None), None)
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        for process in self._started:
            if first is None:  # not found yet, but it ends with the one that started it
                process.kill()
            if process.stdin is not None:
                process.stdin.close()
            process.wait(_END_S)
        wait_until(lambda: not processes_in(self._namespaces), _END_S, "processes are left")
        self._started, self._first = [], {}
        # Were the mounts to be seen out here, removing would reach what they show.
        assert str(self._folder) not in Path("/proc/self/mountinfo").read_text()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write_files(self) -> None:
        for key in ("host_key", "user_key"):
            self._call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / key)
        (self._folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=self._folder))
        hosts = [("127.0.0.1", "localhost"), (_DESK_ADDRESS, _name(None))]
        hosts += [(address, _name(i)) for i, address in enumerate(self.addresses)]
        etc = self._folder / "etc"
        etc.mkdir()
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))
        for file, text in _ETC.items():
            (etc / file).write_text(text.format(folder=self._folder))
        path = os.pathsep.join(str(folder) for folder in _python_path())
        variables = {"PYTHONPATH": path, **self._environment}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
        lines += [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH\n"]
        self.home.mkdir()
        for machine in (None, *range(len(self.addresses))):
            home = self.folder_of(machine, "home")
            (home / ".ssh").mkdir(parents=True, mode=0o700)
            shutil.copy(self._folder / "user_key", home / ".ssh" / "id_ed25519")
            shutil.copy(self._folder / "user_key.pub", home / ".ssh" / "authorized_keys")
            (home / ".bashrc").write_text("".join(lines))
            self.folder_of(machine, "tmp").mkdir()

    def _start_machine(self, machine: int) -> None:
        self._start(machine, [*self._enter(None, "pid", "mnt"), *UNSHARE], depth=2)
        name, switch = _name(machine), self._enter(None, "net")
        end = ("peer", "name", "eth0", "netns", str(self._first[name]))
        self._call(*switch, "ip", "link", "add", name, "type", "veth", *end)
        self._call(*switch, "ip", "link", "set", name, "master", "switch", "up")

    def _start(self, machine: int | None, within: list[str], depth: int) -> None:
        """Starts the first process, which is `depth` generations below the one started here."""
        name, own = _name(machine), self._own(machine)
        script = own / "start.sh"
        script.write_text(self._script(machine))
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(
                [*within, "bash", str(script)],
                stdin=subprocess.PIPE if machine is None else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the test, which ends them in its own way
            )
        self._started.append(process)

        def found() -> bool:
            if process.poll() is not None:
                pytest.skip(f"namespaces cannot be made here: {self.logs()}")
            pids = [process.pid]
            for _ in range(depth):
                pids = children_of(pids[0])[:1] if pids else []
            if pids:
                self._first[name] = pids[0]
            return bool(pids)

        wait_until(found, _START_S, f"{name} did not start", self.logs)
        made = {namespace(self._first[name], kind) for kind in KINDS}
        self._namespaces |= {name for name in made if name is not None}

    def _script(self, machine: int | None) -> str:
        text = _OWN_WORLD + (_DESK if machine is None else _MACHINE)
        return text.format(
            name=_name(machine),
            address=_DESK_ADDRESS if machine is None else self.addresses[machine],
            desk_address=_DESK_ADDRESS,
            own=self._own(machine),
            folder=self._folder,
            sshd=self._sshd,
            visible=" ".join(shlex.quote(str(path)) for path in self._seen_below_tmp()),
        )

    def _seen_below_tmp(self) -> list[Path]:
        wanted = [Path(sys.prefix), Path(sys.base_prefix), *_python_path(), *self._visible]
        seen = {path.resolve() for path in (self._folder, *wanted)}
        return sorted(path for path in seen if Path("/tmp") in path.parents and path.is_dir())

    def _wait_until_ready(self, machine: int | None) -> None:
        first = Path(f"/proc/{self._first[_name(machine)]}")

        def ready() -> bool:
            if not first.exists():
                raise RuntimeError(f"{_name(machine)} ended at its start\n{self.logs()}")
            return (self._own(machine) / "ready").exists()

        wait_until(ready, _START_S, f"{_name(machine)} is not ready", self.logs)

    def _wait_for_ssh(self, machine: int) -> None:
        self._wait_until_ready(machine)
        command = f"ssh {SSH_OPTIONS} {self.addresses[machine]} true"
        wait_until(
            lambda: self.run(None, command, timeout_s=15.0).returncode == 0,
            _START_S,
            f"no ssh to {_name(machine)}",
            self.logs,
            poll_s=0.2,
        )

    def _enter(self, machine: int | None, *kinds: str) -> list[str]:
        first = self._first.get(_name(machine))
        if first is None:
            raise RuntimeError(f"{_name(machine)} does not run: not yet, or not any more")
        return ["nsenter", f"--target={first}", *(f"--{KINDS[kind]}" for kind in kinds)]

    def _own(self, machine: int | None) -> Path:
        return self._folder / _name(machine)

    def _call(self, *command: str | Path) -> None:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_S
        )
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(map(str, command))}: {done.stderr}\n{self.logs()}")


SSH_OPTIONS = (
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "
    "-o BatchMode=yes -o ConnectTimeout=10"
)


def _name(machine: int | None) -> str:
    return "desk" if machine is None else f"machine{machine}"


def _python_path() -> list[Path]:
    """Where what this process imports lies, apart from its environment."""
    named = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return [Path(tpengine.__file__).parent.parent, *(Path(folder).resolve() for folder in named)]


def _require_tools() -> str:
    """The path of sshd; sees to the other programs, too."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("machines of namespaces need root on Linux")
    for command, package in (
        ("ip", "iproute2"),
        ("ssh", "openssh-client"),
        ("ssh-keygen", "openssh-client"),
        ("nsenter", "util-linux"),
        ("unshare", "util-linux"),
        ("mount", "mount"),
    ):
        require(command, package)
    return require("sshd", "openssh-server")
