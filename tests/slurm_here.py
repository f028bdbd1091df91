"""A Slurm of one node on this machine, for one test: Debian's slurmctld and slurmd, on loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from team import free_port

INSTALL = "apt-get install slurmctld slurmd slurm-client"
_PROGRAMS = ("slurmctld", "slurmd", "sinfo", "sbatch", "srun", "scancel", "setpriv")
_START_SECONDS = 60
# No accounting, which wants a database of its own: sacct says so, and submitit goes by files.
_CONFIGURATION = """
ClusterName=layerparity
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
KillWait=120
MessageTimeout=60
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=128000 State=UNKNOWN
PartitionName=trn2 Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no Slurm can be started here; empty where it can."""
    absent = [each for each in _PROGRAMS if shutil.which(each) is None]
    absent += [] if os.geteuid() == 0 else ["root, as whom slurmd starts jobs"]
    return f"no {', '.join(absent)} here: {INSTALL}" if absent else ""


class Slurm:
    """One node that is its own controller."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.configuration)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start both daemons, and wait until the node takes jobs."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        names = {"host": socket.gethostname(), "folder": self.folder}
        ports = {"controller": free_port(), "node": free_port()}
        self.configuration.write_text(_CONFIGURATION.format(**names, **ports))
        with (self.folder / "daemons.log").open("wb") as log:
            for words in (["slurmctld", "-D", "-i"], ["slurmd", "-D"]):
                # The kernel ends them with their parent, however that ends.
                command = ["setpriv", "--pdeathsig", "TERM", *words, "-f", str(self.configuration)]
                self._processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        deadline = time.monotonic() + _START_SECONDS
        while "idle" not in self.said("sinfo", "--noheader"):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def said(self, *command: str) -> str:
        """Return what one of Slurm's commands prints."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout

    def did(self, *command: str) -> None:
        """Do one of Slurm's commands, which must not fail."""
        environment = {**os.environ, **self.environment}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr

    def logs(self) -> str:
        """Return the end of what both daemons wrote, for the message of a test that failed."""
        return "\n".join(file.read_text()[-2000:] for file in self.folder.glob("*.log"))

    def stop(self) -> None:
        """End its jobs, and then the processes that were started: a job's end is told to both."""
        deadline = time.monotonic() + _START_SECONDS
        self.said("scancel", "--user=root")
        while self.said("squeue", "--noheader") and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(timeout=_START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
