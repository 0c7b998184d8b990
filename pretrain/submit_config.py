"""What a submission takes besides the run: the cluster, the number of nodes, and the drill. No torch here."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """A container for pyxis (srun --container-image). image: None runs on the node itself. mounts: SOURCE:TARGET pairs; the repository and the
    run directory are mounted at their own paths anyway. workdir: None is the directory of the submission."""

    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    workdir: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where jobs run: one file per cluster in configs/cluster/.

    partition, account, qos, constraint  Slurm's names; None leaves the choice to Slurm.
    gpus_per_node       GPUs asked for on every node, each with one process; 0 runs on CPUs.
    processes_per_node  ranks per node; None: one per GPU. Needed where gpus_per_node=0.
    cpus_per_node       cores asked for on every node; None: Slurm's default.
    mem                 memory of a node as Slurm writes it (0: all of it, 512G); None: Slurm's default.
    exclusive           whole nodes.
    time                time limit of one life of the job, as Slurm writes it (D-HH:MM:SS); a longer run is requeued.
    rank_memory_gib     memory of one rank in GiB that the plan counts with; None: this machine's.
    signal_lead         seconds before the limit at which the run is told to save: longer than a step and a save.
    max_restarts        how often torchrun starts the ranks of one life again after one died; they resume the newest checkpoint.
    network_interface   for GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, such as eth0; None leaves the choice to them.
    python              the interpreter on the nodes (in the container); None: the one that submits, or python3 in a container.
    setup               shell lines that run on the first node before anything else, such as `module load cuda`.
    environment         variables of the job. Secrets are refused here: what is exported where you submit reaches the job by itself.
    extra               further #SBATCH options, such as --reservation=mine.
    container           the container, if any.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = 0
    processes_per_node: int | None = None
    cpus_per_node: int | None = None
    mem: str | None = None
    exclusive: bool = False
    time: str = "1-00:00:00"
    rank_memory_gib: float | None = None
    signal_lead: int = 300
    max_restarts: int = 0
    network_interface: str | None = None
    python: str | None = None
    setup: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    container: ContainerConfig = field(default_factory=ContainerConfig)

    @property
    def ranks_per_node(self) -> int:
        """Processes of the run on one node."""
        return self.processes_per_node or self.gpus_per_node


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """A rehearsal of preemption.

    steps      length of each of its two runs, the straight one and the interrupted one: long enough that the signal falls into the second.
    signal_at  the step after which the signal is sent.
    minutes    how long the whole drill may take, the wait in the queue included.
    tolerance  largest relative difference of a loss; 0: identical.
    """

    steps: int = 1000
    signal_at: int = 100
    minutes: float = 30.0
    tolerance: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """after: a job that must end well before this one starts (a former phase). poll: seconds between two looks at the queue."""

    cluster: ClusterConfig
    nodes: int = 1
    after: int | None = None
    poll: float = 5.0
    drill: DrillConfig = field(default_factory=DrillConfig)
