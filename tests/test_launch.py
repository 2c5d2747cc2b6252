"""Starting and ending: torchrun on two nodes, Lightning's own launcher, Slurm; a killed process, SIGTERM and SIGUSR1."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import HANGS, assert_same, assert_same_runs, fit, load, output, slow, untimed
from tests.test_distributed import EXACT, FORKED, GLOBAL, assert_equal_runs, free_port

ROOT = Path(__file__).parents[1]
RUN = str(ROOT / "run.py")


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without variables set for other processes by an earlier test or whoever started pytest."""
    names = "MASTER_ADDR MASTER_PORT RANK LOCAL_RANK GROUP_RANK NODE_RANK WORLD_SIZE PL_GLOBAL_SEED".split()
    return {name: value for name, value in os.environ.items() if name not in names} | extra


def send(tmp_path: Path, number: int, at: int, rank: int = 0) -> list[str]:
    """Settings that send a signal to a process of the run, once."""
    settings = {"marker": tmp_path / f"sent-{number}-{at}", "number": int(number), "at": at, "rank": rank}
    callback = ["--trainer.callbacks+", "tests.helpers.SendSignal"]
    return callback + [word for name, value in settings.items() for word in (f"--trainer.callbacks.{name}", str(value))]


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@contextmanager
def two_nodes():
    """For each of two nodes: its address, the prefix of commands on it, and its network interface.

    Two network namespaces connected by a virtual cable, if permitted; otherwise two names for this machine.
    """
    names = [f"node{number}-{os.getpid()}" for number in range(2)]
    made = all([ip("netns", "add", name) for name in names])
    cables = [f"cable{number}" for number in range(2)]
    try:
        made = made and ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", cables[1], "netns", names[1])
        for number, name in enumerate(names):
            made = made and ip("-n", name, "addr", "add", f"10.231.7.{number + 1}/24", "dev", cables[number])
            made = made and ip("-n", name, "link", "set", cables[number], "up") and ip("-n", name, "link", "set", "lo", "up")
        if made:
            yield [(f"10.231.7.{n + 1}", ["ip", "netns", "exec", names[n]], cables[n]) for n in range(2)]
        else:
            yield [("127.0.0.1", [], "lo") for _ in range(2)]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
def test_two_nodes_under_torchrun_end_with_a_killed_process_and_go_on(tiny, tmp_path):
    tiny = [*tiny, *EXACT, *GLOBAL]
    assert fit(tiny, "one", tmp_path / "one") == 0
    overlay = ["--config", str(ROOT / "conf/trainer/ddp_nodes.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    overlay += ["--trainer.num_nodes", "2", "--ckpt_path", "auto"]

    def start(nodes, at: int, *options: str) -> tuple[list[int], str]:
        """Exit statuses and output of the same command on both nodes; kills a process in that batch, once."""
        port, started, logs = str(free_port()), [], [tmp_path / f"node{number}.txt" for number in range(2)]
        killed = send(tmp_path, signal.SIGKILL, at, rank=1)
        for number, (address, prefix, interface) in enumerate(nodes):
            torchrun = [sys.executable, *"-m torch.distributed.run --nnodes 2 --nproc_per_node 1 --rdzv_id 1".split()]
            torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{nodes[0][0]}:{port}", "--local_addr", address]
            # Its own name does not resolve within a namespace: the first node must be told that it is the endpoint.
            torchrun += ["--rdzv_conf", f"is_host={'false' if number else 'true'}", *options]
            environment = clean_environment(
                GLOO_SOCKET_IFNAME=interface, PYTHONPATH=str(ROOT), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"
            )
            with open(logs[number], "w") as log:
                command = [*prefix, *torchrun, RUN, "fit", *tiny, *overlay, "--name", "two", *killed]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            return [process.wait(HANGS) for process in started], "".join(log.read_text() for log in logs)
        finally:
            for process in started:
                process.kill()

    with two_nodes() as nodes:
        statuses, shown = start(nodes, 7)
        assert all(statuses) and "lost another one of this run" in shown and "Signal 9 (SIGKILL)" in shown, shown
        assert load(tmp_path / "runs/two/checkpoints/last.ckpt")["global_step"] == 5
        # The same command goes on, and once more when torchrun restarts it.
        statuses, shown = start(nodes, 9, "--max_restarts", "1")
        assert statuses == [0, 0] and shown.count("resuming at step 5") == 2, shown
    assert_equal_runs(tmp_path, "one", "two")


@pytest.mark.slow
def test_a_killed_process_ends_a_run_that_lightning_started(tiny, tmp_path):
    settings = ["--config", str(ROOT / "conf/trainer/ddp.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    command = [sys.executable, RUN, "fit", *tiny, *settings, "--trainer.max_steps", "100000", "--name", "run"]
    environment = clean_environment(PYTHONPATH=str(ROOT), MASTER_PORT=str(free_port()))
    command += send(tmp_path, signal.SIGKILL, 7, rank=1)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert done.returncode != 0
    # This process notices by the broken connection, or Lightning notices, which watches its processes and then ends this one.
    lost = "lost another one of this run" in done.stderr and "process 1 of this machine was ended by SIGKILL" in done.stderr
    assert lost or "terminated with code -9" in done.stderr, done.stderr
    assert load(tmp_path / "runs/run/checkpoints/last.ckpt")["global_step"] == 5


# Signals


def assert_whole(tmp_path: Path, name: str, processes: int = 1) -> None:
    """The stopped and resumed run equals the uninterrupted one, to the last bit."""
    assert_same_runs(tmp_path, "whole", name, processes=processes)
    assert_same(*(untimed(tmp_path / f"runs/{run}/perplexity.csv") for run in ("whole", name)))


# In the middle of an accumulation; in a step followed by a validation.
@pytest.mark.parametrize("at, step", [(10, 4), slow(19, 7)], ids=["accumulating", "validation"])
def test_sigterm_saves_the_step_and_the_run_goes_on_exactly(at, step, tiny, tmp_path):
    tiny = [*tiny, "--trainer.accumulate_grad_batches", "3", "--trainer.max_steps", "9"]
    tiny += ["--trainer.val_check_interval", "21"]  # in batches: after step 7
    assert fit(tiny, "whole", tmp_path / "whole") == 0
    assert fit(tiny, "stopped", tmp_path / "stopped", *send(tmp_path, signal.SIGTERM, at)) == 143
    assert f"stopped by SIGTERM at step {step}; --ckpt_path last continues the run" in (tmp_path / "stopped.out").read_text()
    assert load(tmp_path / "runs/stopped/checkpoints/last.ckpt")["global_step"] == step
    assert fit(tiny, "stopped", tmp_path / "stopped", "--ckpt_path", "auto") == 0
    assert_whole(tmp_path, "stopped")


@pytest.mark.slow
def test_sigterm_to_one_of_two_processes_stops_both_after_one_step(tiny, tmp_path):
    tiny = [*tiny, *FORKED]
    assert fit(tiny, "whole", tmp_path / "whole") == 0
    assert fit(tiny, "stopped", tmp_path / "stopped", *send(tmp_path, signal.SIGTERM, 3, rank=1)) != 0
    assert "stopped by SIGTERM at step 4" in (tmp_path / "stopped.out").read_text()
    assert fit(tiny, "stopped", tmp_path / "stopped", "--ckpt_path", "last") == 0
    assert_whole(tmp_path, "stopped", processes=2)


@pytest.mark.parametrize(
    "status, told", [slow(0, "job 7_2 is in Slurm's queue again"), (1, "job 7_2 was not requeued: no such job")]
)
def test_slurms_sigusr1_saves_and_requeues(status, told, put, tiny, tmp_path, monkeypatch):
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/asked"\n[ {status} = 0 ] || echo no such job >&2\nexit {status}\n')
    scontrol.chmod(0o755)
    slurm = {"NTASKS": 1, "NTASKS_PER_NODE": 1, "NNODES": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 9}
    slurm |= {"ARRAY_JOB_ID": 7, "ARRAY_TASK_ID": 2, "JOB_NAME": "lit-linformer", "NODELIST": "127.0.0.1"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    overlay = ["--config", str(ROOT / "conf/trainer/slurm.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    job = [*tiny, *overlay, "--trainer.num_nodes", "1", "--ckpt_path", "auto"]
    assert fit(job, "job", tmp_path / "job", *send(tmp_path, signal.SIGUSR1, 3)) == 138
    assert (tmp_path / "asked").read_text() == "requeue 7_2\n"
    assert "stopped by SIGUSR1 at step 3" in (shown := (tmp_path / "job.out").read_text()) and told in shown
    if status == 0:
        assert fit(job, "job", tmp_path / "job") == 0
        put("whole")
        assert_whole(tmp_path, "job")


# Errors at the start


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_do_not_find_each_other_are_one_line(rank, tiny, tmp_path, monkeypatch):
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "NODE_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    overlay = ["--config", str(ROOT / "conf/trainer/ddp_nodes.yaml"), "--trainer.accelerator", "cpu", "--trainer.devices", "1"]
    settings = ["--trainer.num_nodes", "2", "--trainer.strategy.timeout", "0:00:02"]
    line = output(["fit", *tiny, *overlay, *settings], tmp_path, status=2).splitlines()[-1]
    assert line.startswith(f"error: the processes of the run did not find each other at 127.0.0.1:{os.environ['MASTER_PORT']}")
    assert "trainer.strategy.timeout" in line


def test_more_processes_than_the_settings_say_are_one_line(tiny, tmp_path, monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    line = output(["fit", *tiny], tmp_path, status=2).splitlines()[-1]
    assert (
        line
        == "error: trainer.devices × trainer.num_nodes is 1 × 1; allowed: 2 in all, the processes that torchrun has started"
    )


def test_a_job_without_ntasks_per_node_is_one_line(tiny, tmp_path, monkeypatch):
    for name, value in {"NTASKS": "2", "PROCID": "0", "LOCALID": "0", "NODEID": "0", "JOB_NAME": "mine"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE", raising=False)
    line = output(["fit", *tiny], tmp_path, status=2).splitlines()[-1]
    assert line.startswith("error: SLURM_NTASKS is 2 and the job has no --ntasks-per-node; allowed: sbatch with")


DDP = ["--config", str(ROOT / "conf/trainer/ddp.yaml"), "--trainer.accelerator", "cpu"]
SLURM = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_NAME": "mine"}


@pytest.mark.parametrize(
    "variables, more, told",
    [
        ({"LOCAL_RANK": "x"}, [], "LOCAL_RANK is 'x' in the environment; allowed: a whole number, or none: `unset LOCAL_RANK`"),
        ({"RANK": ""}, [], "RANK is '' in the environment; allowed: a whole number"),
        ({"SLURM_NTASKS": "x"}, [], "SLURM_NTASKS is 'x' in the environment; allowed: a whole number"),
        ({"LOCAL_RANK": "3"}, [], "LOCAL_RANK is 3 in the environment, and trainer.devices × trainer.num_nodes is 1 × 1"),
        ({"LOCAL_RANK": "3"}, [*DDP, "--trainer.devices", "2"], "LOCAL_RANK is 3 in the environment, and trainer.devices × "),
        ({"RANK": "1"}, ["--trainer.devices", "2"], "RANK is 1 in the environment, and trainer.devices × "),
        ({"NODE_RANK": "1"}, [], "NODE_RANK is 1 in the environment, and trainer.devices × trainer.num_nodes is 1 × 1"),
        ({"MASTER_PORT": "tcp://a:1"}, ["--trainer.devices", "2"], "MASTER_PORT is 'tcp://a:1' in the environment; allowed: "),
        ({}, [*DDP, "--trainer.num_nodes", "2"], "trainer.num_nodes is 2, and MASTER_PORT is not set; allowed: MASTER_ADDR, "),
        (SLURM, ["--trainer.devices", "2"], "SLURM_NODEID is not set, as srun does for each process; allowed: srun before the"),
        (SLURM, [*DDP, "--trainer.devices", "2"], "SLURM_NODEID is not set, as srun does for each process; allowed: srun"),
    ],
)  # fmt: skip
def test_variables_of_other_processes_are_one_line(variables, more, told, tiny, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = output(["fit", *tiny, *more], tmp_path, status=2).splitlines()[-1]
    assert line.startswith(f"error: {told}"), line
    assert not (tmp_path / "runs").exists()


def test_torchrun_in_tasks_of_slurm_asks_before_a_run_is_overwritten(put, tiny, tmp_path, monkeypatch):
    """`srun torchrun`: torchrun's process 0 may be on any of Slurm's machines."""
    put("whole")
    started = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    line = output(["fit", *tiny, "--name", "whole"], tmp_path, status=2).splitlines()[-1]
    assert line.startswith("error: name: runs/whole already holds a run")


def test_slurm_script_starts_the_run(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "8"}
    script = [str(ROOT / "scripts/slurm.sh"), "conf/quickstart.yaml", "--name", "mine"]
    done = subprocess.run(["bash", *script], env=variables, capture_output=True, text=True, check=True)
    expected = "--kill-on-bad-exit=1 python run.py fit --config conf/quickstart.yaml --config conf/trainer/slurm.yaml "
    expected += "--ckpt_path auto --trainer.num_nodes 1 --trainer.devices 8 --name mine"
    assert done.stdout.split() == expected.split()
    assert all((ROOT / word).is_file() for word in expected.split() if word.endswith(".yaml"))
