"""Files that start jobs on other engines: as far as can be seen without these engines.

Fields are those that the engines' own schemas know and require: Kubeflow Trainer's `trainjob_types.go` and
`trainingruntime_types.go` (v1alpha1), JobSet's reference of v1alpha2, SkyPilot's `sky/utils/schemas.py`.
"""

from __future__ import annotations

import ast
import os
import shlex
import shutil
import subprocess
import time

import pytest
import yaml

from autopar.cli import _parser
from tests.docs.blocks import HERE

OPS = HERE / "examples" / "ops"
POD = {
    "type": "object",
    "required": ["containers"],
    "additionalProperties": False,
    "properties": {
        "restartPolicy": {"enum": ["Never"]},
        "terminationGracePeriodSeconds": {"type": "integer"},
        "volumes": {"type": "array", "items": {"required": ["name"]}},
        "containers": {
            "items": {
                "required": ["name", "image"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "image": {"type": "string"},
                    "command": {"items": {"type": "string"}},
                    "args": {"items": {"type": "string"}},
                    "ports": {"items": {"required": ["containerPort"]}},
                    "env": {"items": {"properties": {"name": {"type": "string"}, "value": {"type": "string"}}}},
                    "resources": {"required": ["limits"]},
                    "volumeMounts": {"items": {"required": ["name", "mountPath"]}},
                },
            }
        },
    },
}
JOBSET = {
    "type": "object",
    "required": ["replicatedJobs"],
    "additionalProperties": False,
    "properties": {
        "network": {"properties": {"enableDNSHostnames": {"type": "boolean"}}, "additionalProperties": False},
        "failurePolicy": {"properties": {"maxRestarts": {"type": "integer"}}, "additionalProperties": False},
        "replicatedJobs": {
            "items": {
                "required": ["name", "template"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "replicas": {"type": "integer"},
                    "template": {
                        "properties": {
                            "metadata": {"type": "object"},
                            "spec": {
                                "additionalProperties": False,
                                "properties": {
                                    "parallelism": {"type": "integer"},
                                    "completions": {"type": "integer"},
                                    "backoffLimit": {"type": "integer"},
                                    "template": {"properties": {"spec": POD}, "additionalProperties": False},
                                },
                            },
                        },
                        "additionalProperties": False,
                    },
                },
            }
        },
    },
}
SCHEMAS = {
    "JobSet": ("jobset.x-k8s.io/v1alpha2", JOBSET),
    "TrainingRuntime": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "required": ["template"],
            "additionalProperties": False,
            "properties": {
                "mlPolicy": {
                    "properties": {"numNodes": {"type": "integer"}, "torch": {"type": "object"}},
                    "additionalProperties": False,
                },
                "template": {"properties": {"spec": JOBSET}, "additionalProperties": False},
            },
        },
    ),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "required": ["runtimeRef"],
            "additionalProperties": False,
            "properties": {
                "runtimeRef": {
                    "required": ["name"],
                    "properties": {"kind": {"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}},
                },
                "trainer": {
                    "additionalProperties": False,
                    "properties": {
                        "image": {"type": "string"},
                        "command": {"items": {"type": "string"}},
                        "args": {"items": {"type": "string"}},
                        "env": {"items": {"properties": {"name": {"type": "string"}, "value": {"type": "string"}}}},
                        "numNodes": {"type": "integer"},
                        "numProcPerNode": {"type": "integer"},
                        "resourcesPerNode": {"type": "object"},
                    },
                },
            },
        },
    ),
}
SKY = {
    "required": ["run"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "workdir": {"type": "string"},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "file_mounts": {
            "additionalProperties": {
                "additionalProperties": False,
                "properties": {
                    "name": {},
                    "source": {},
                    "store": {},
                    "mode": {"enum": ["MOUNT", "COPY", "MOUNT_CACHED"]},
                },
            }
        },
        "resources": {
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "additionalProperties": False,
                    "properties": {
                        "strategy": {"enum": ["FAILOVER", "EAGER_NEXT_REGION"]},
                        "max_restarts_on_errors": {"type": "integer", "minimum": 0},
                    },
                },
            },
        },
    },
}


@pytest.fixture
def validate():
    return pytest.importorskip("jsonschema").validate


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_objects_of_kubernetes_have_the_fields_of_their_kinds(name, validate):
    given = list(yaml.safe_load_all((OPS / name).read_text()))
    for data in given:
        version, schema = SCHEMAS[data["kind"]]
        assert data["apiVersion"] == version and set(data) == {"apiVersion", "kind", "metadata", "spec"}
        validate(data["spec"], schema)
    specs = {data["kind"]: data for data in given}
    if "TrainJob" in specs:
        assert specs["TrainJob"]["spec"]["runtimeRef"]["name"] == specs["TrainingRuntime"]["metadata"]["name"]
        (job,) = specs["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        labels = job["template"]["metadata"]["labels"]
        assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # the one that a job runs in
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        assert container["name"] == "node"
    else:
        (job,) = specs["JobSet"]["spec"]["replicatedJobs"]
        spec = job["template"]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        asked = _parser().parse_args([*container["command"], *container["args"]][1:])
        assert asked.nodes == spec["parallelism"] == spec["completions"]
        assert asked.ranks == container["resources"]["limits"]["nvidia.com/gpu"]
        first = f"{specs['JobSet']['metadata']['name']}-{job['name']}-0-0.{specs['JobSet']['metadata']['name']}"
        assert asked.endpoint == f"{first}:{container['ports'][0]['containerPort']}"
        assert (HERE / asked.script).is_file()


def test_the_task_of_skypilot_has_its_fields_and_a_command(validate):
    task = yaml.safe_load((OPS / "skypilot.yaml").read_text())
    validate(task, SKY)
    ranks = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    said = subprocess.run(
        ["bash", "-euc", f"autopar() {{ printf '%s\\n' \"$@\"; }}\n{task['run']}"],
        env={**os.environ, **ranks},
        capture_output=True,
        text=True,
        check=True,
    )
    asked = _parser().parse_args(said.stdout.splitlines())
    assert (asked.ranks, asked.nodes, asked.endpoint, asked.max_restarts) == (8, 2, "10.0.0.1:29500", 3)


def test_the_program_of_ray_compiles_and_calls_what_is_there():
    """Its names are those of `ray.train` 2.x; without Ray nothing here imports it."""
    tree = ast.parse((OPS / "ray_train.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {"TorchTrainer", "ScalingConfig", "RunConfig", "FailureConfig", "loop"} <= names
    assert any(
        isinstance(n, ast.FunctionDef) and n.name == "loop" for n in ast.parse((OPS / "train.py").read_text()).body
    )


def slurm(folder, step, **env):
    """Run the SLURM script beside stand-ins for SLURM's commands, which write down how they are called."""
    fakes = {
        "scontrol": 'echo "scontrol $*" >> calls; [ "$1" != show ] || printf "node7\\nnode8\\n"',
        "scancel": 'echo "scancel $*" >> calls; kill -TERM "$(cat step)"',
        "srun": f'echo "srun $*" >> calls; echo $$ > step; {step}',
    }
    (folder / "bin").mkdir()
    for name, body in fakes.items():
        path = folder / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{body}\n")
        path.chmod(0o755)
    given = {"JOB_ID": "31415", "JOB_NODELIST": "node[7-8]", "NNODES": "2", "GPUS_ON_NODE": "8", "CPUS_PER_TASK": "64"}
    return subprocess.Popen(
        ["bash", str(OPS / "slurm.sh"), "train.py", "--steps", "9"],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            **{f"SLURM_{k}": v for k, v in given.items()},
            **env,
        },
    )


def calls(folder):
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


def test_slurm_starts_one_command_a_node(tmp_path):
    assert slurm(tmp_path, "exit 3", IMAGE="train:1").wait(20) == 3  # the job ends as its ranks do
    _, called = calls(tmp_path)
    at = called.index("autopar")
    assert "--kill-on-bad-exit=1" in called[:at] and "--container-image=train:1" in called[:at]
    asked = _parser().parse_args(called[at + 1 :])
    assert (asked.ranks, asked.nodes, asked.endpoint, asked.max_restarts) == (8, 2, "node7:31415", 3)
    assert asked.log_dir == "logs/31415/start-0" and (tmp_path / asked.log_dir).is_dir()
    assert (asked.script, asked.arguments) == ("train.py", ["--steps", "9"])


@pytest.mark.parametrize("leaves, ends", [("exit 143", 143), ("exit 0", 0)])
def test_slurm_requeues_a_job_whose_time_ends(leaves, ends, tmp_path):
    """The step is told, may save, and the job is queued again, unless it has just come to its end."""
    job = slurm(tmp_path, f"trap '{leaves}' TERM; for i in $(seq 100); do sleep 0.1; done")
    until = time.monotonic() + 20
    while not (tmp_path / "step").is_file() and time.monotonic() < until:
        time.sleep(0.05)
    job.send_signal(10)  # SIGUSR1, which `--signal=B:USR1@300` sends to the script
    assert job.wait(20) == ends
    told = calls(tmp_path)[2:]
    assert told == [["scancel", "--signal=TERM", "31415.0"], *([["scontrol", "requeue", "31415"]] if ends else [])]


def test_shell_scripts_are_clean():
    subprocess.run(["bash", "-n", str(OPS / "slurm.sh")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(OPS / "slurm.sh")], check=True)
