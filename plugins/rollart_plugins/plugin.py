"""The built-in engines, weight channels, mappers, trackers, sandboxes, runtimes and the like.

Takes: nothing. Gives: their specs, written in code, and those of commands. Never: imports what they
name.
"""

from typing import Final

from rollart_core.contracts.adapter import EnvAdapterSpec
from rollart_core.contracts.forward_pass import ForwardPassSpec
from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.contracts.inference import InferenceEngineSpec
from rollart_core.contracts.reward import RewardBackendSpec
from rollart_core.contracts.runtime import RuntimeSpec
from rollart_core.contracts.sandbox import SandboxSpec
from rollart_core.contracts.sandbox_service import SandboxServiceSpec
from rollart_core.contracts.spec import CommandSpec
from rollart_core.contracts.tracker import TrackerSpec
from rollart_core.contracts.weights import WeightChannelSpec
from rollart_core.plugins.hookspecs import hookimpl

CONTRACT_VERSION: Final = 2


@hookimpl
def rollart_inference_engines() -> list[InferenceEngineSpec]:
    """Return the built-in inference engines."""
    return [
        InferenceEngineSpec(
            id="rollart/Embedded-v1",
            alias="embedded",
            entry_point="rollart_plugins.engines.embedded:EmbeddedEngine",
            config="rollart_plugins.engines.config:EmbeddedConfig",
            summary="Continuous batching in torch, on CPU or CUDA, with no server.",
            merges_adapters=True,
            scores=True,
        ),
        InferenceEngineSpec(
            id="rollart/SGLang-v1",
            alias="sglang",
            entry_point="rollart_plugins.engines.sglang:SGLangEngine",
            config="rollart_plugins.engines.sglang_config:SGLangConfig",
            summary="SGLang servers, launched and watched, or running ones.",
            keeps_deterministic=False,
            takes_index=True,
            devices_option="tp_size",
            first_device_option="first_gpu",
        ),
        InferenceEngineSpec(
            id="rollart/OpenAI-v1",
            alias="openai",
            entry_point="rollart_plugins.engines.openai:OpenAIEngine",
            config="rollart_plugins.engines.openai_config:OpenAIConfig",
            summary="Any OpenAI-compatible server, in tokens (vLLM) or in text; for evaluation.",
            takes_text=True,
            follows_training=False,
            keeps_deterministic=False,
        ),
        InferenceEngineSpec(
            id="rollart/VLLM-v1",
            alias="vllm",
            entry_point="rollart_plugins.engines.vllm:VllmEngine",
            config="rollart_plugins.engines.openai_config:VllmConfig",
            summary="A running vLLM server, asked in tokens; it reloads weights from a folder.",
            keeps_deterministic=False,
            takes_index=True,
        ),
    ]


@hookimpl
def rollart_weight_channels() -> list[WeightChannelSpec]:
    """Return the built-in weight channels."""
    return [
        WeightChannelSpec(
            id="rollart/SharedMemory-v1",
            alias="shared-memory",
            entry_point="rollart_plugins.weights.shared_memory:SharedMemoryChannel",
            config="rollart_plugins.weights.config:SharedMemoryConfig",
            summary="Memory shared by the processes of one machine.",
            reach="machine",
        ),
        WeightChannelSpec(
            id="rollart/Disk-v1",
            alias="disk",
            entry_point="rollart_plugins.weights.disk:DiskChannel",
            config="rollart_plugins.weights.config:DiskConfig",
            summary="Safetensors files in a folder that trainer and engines can both read.",
        ),
        WeightChannelSpec(
            id="rollart/Collective-v1",
            alias="collective",
            entry_point="rollart_plugins.weights.collective:CollectiveChannel",
            config="rollart_plugins.weights.config:CollectiveConfig",
            summary="Broadcast from the trainer to all engines, by gloo or NCCL.",
            reach="network",
        ),
        WeightChannelSpec(
            id="rollart/Delta-v1",
            alias="delta",
            entry_point="rollart_plugins.weights.delta:DeltaChannel",
            config="rollart_plugins.weights.config:DeltaConfig",
            summary="Changed elements only, bit for bit, over another channel.",
        ),
    ]


@hookimpl
def rollart_hardware_mappers() -> list[HardwareMapperSpec]:
    """Return the built-in hardware mappers."""
    return [
        HardwareMapperSpec(
            id="rollart/Affinity-v1",
            alias="affinity",
            entry_point="rollart_planner.mappers.affinity:AffinityMapper",
            summary="Each environment on the hardware that suits it: most trajectories per second.",
        ),
        HardwareMapperSpec(
            id="rollart/Cost-v1",
            alias="cost",
            entry_point="rollart_planner.mappers.cost:CostMapper",
            summary="The most trajectories for the price of the devices in use.",
        ),
        HardwareMapperSpec(
            id="rollart/Static-v1",
            alias="static",
            entry_point="rollart_planner.mappers.static:StaticMapper",
            config="rollart_planner.mappers.config:StaticConfig",
            summary="Everything where the config says.",
        ),
        HardwareMapperSpec(
            id="rollart/Random-v1",
            alias="random",
            entry_point="rollart_planner.mappers.random:RandomMapper",
            config="rollart_planner.mappers.config:RandomConfig",
            summary="A pool drawn for each environment: what to compare placements with.",
        ),
        HardwareMapperSpec(
            id="rollart/Colocate-v1",
            alias="colocate",
            entry_point="rollart_planner.mappers.colocate:ColocateMapper",
            summary="Everything on the first pool that can carry it.",
        ),
    ]


@hookimpl
def rollart_trackers() -> list[TrackerSpec]:
    """Return the built-in trackers."""
    return [
        TrackerSpec(
            id="rollart/TensorBoard-v1",
            alias="tensorboard",
            entry_point="rollart_plugins.trackers.tensorboard:TensorBoardTracker",
            summary="Event files for TensorBoard in the run directory.",
        ),
        TrackerSpec(
            id="rollart/Wandb-v1",
            alias="wandb",
            entry_point="rollart_plugins.trackers.wandb:WandbTracker",
            config="rollart_plugins.trackers.config:WandbConfig",
            summary="Weights & Biases, online or in files to upload later.",
        ),
    ]


@hookimpl
def rollart_sandboxes() -> list[SandboxSpec]:
    """Return the built-in sandboxes."""
    return [
        SandboxSpec(
            id="rollart/Docker-v1",
            alias="docker",
            entry_point="rollart_sandboxes.docker:DockerSandbox",
            config="rollart_sandboxes.config:DockerConfig",
            summary="A container of a Docker engine: no network, the image read-only.",
            isolation="container",
        ),
        SandboxSpec(
            id="rollart/Bubblewrap-v1",
            alias="bubblewrap",
            entry_point="rollart_sandboxes.bubblewrap:BubblewrapSandbox",
            config="rollart_sandboxes.config:BubblewrapConfig",
            summary="Linux namespaces by bubblewrap: no network, the system read-only, no daemon.",
            isolation="namespace",
        ),
        SandboxSpec(
            id="rollart/Process-v1",
            alias="process",
            entry_point="rollart_sandboxes.process:ProcessSandbox",
            config="rollart_sandboxes.config:ProcessConfig",
            summary="No wall at all, for trusted code: a temp folder and a process group.",
            isolation="none",
        ),
    ]


@hookimpl
def rollart_reward_backends() -> list[RewardBackendSpec]:
    """Return the built-in reward backends."""
    return [
        RewardBackendSpec(
            id="rollart/Inline-v1",
            alias="inline",
            entry_point="rollart_plugins.serverless.inline:InlineBackend",
            summary="Reward functions in threads of the controller's process.",
            in_process=True,
        ),
        RewardBackendSpec(
            id="rollart/Pool-v1",
            alias="pool",
            entry_point="rollart_plugins.serverless.pool:PoolBackend",
            config="rollart_plugins.serverless.config:PoolConfig",
            summary="Worker processes, started on demand and ended when idle; in boxes if asked.",
        ),
        RewardBackendSpec(
            id="rollart/Http-v1",
            alias="http",
            entry_point="rollart_plugins.serverless.http_backend:HttpBackend",
            config="rollart_plugins.serverless.config:HttpConfig",
            summary="A function behind a URL, such as `rollart serve-reward` in a container.",
        ),
        RewardBackendSpec(
            id="rollart/Lambda-v1",
            alias="lambda",
            entry_point="rollart_plugins.serverless.lambda_backend:LambdaBackend",
            config="rollart_plugins.serverless.config:LambdaConfig",
            summary="A function on AWS Lambda, asked through boto3.",
        ),
        RewardBackendSpec(
            id="rollart/Fc-v1",
            alias="fc",
            entry_point="rollart_plugins.serverless.fc_backend:FcBackend",
            config="rollart_plugins.serverless.config:FcConfig",
            summary="A function on Alibaba Function Compute, asked through its SDK.",
        ),
        RewardBackendSpec(
            id="rollart/RayServe-v1",
            alias="ray_serve",
            entry_point="rollart_plugins.serverless.ray_serve:RayServeBackend",
            config="rollart_plugins.serverless.config:RayServeConfig",
            summary="A deployment of Ray Serve that scales to nothing and back.",
        ),
    ]


@hookimpl
def rollart_runtimes() -> list[RuntimeSpec]:
    """Return the built-in runtimes, besides the core's ``inline``."""
    return [
        RuntimeSpec(
            id="rollart/Ray-v1",
            alias="ray",
            entry_point="rollart_ray.runtime:RayRuntime",
            summary="Actors on the pools of a Ray cluster.",
        )
    ]


@hookimpl
def rollart_forward_passes() -> list[ForwardPassSpec]:
    """Return the built-in forward passes, besides those of the core."""
    return [
        ForwardPassSpec(
            id="rollart/PrefixTree-v1",
            alias="tree",
            entry_point="rollart_cpu.training.policy:TreePolicy",
            summary="Llama, Mistral, Qwen2 and Qwen3 on one rank in float32: each prefix once.",
        )
    ]


@hookimpl
def rollart_sandbox_services() -> list[SandboxServiceSpec]:
    """Return the built-in sandbox service."""
    return [
        SandboxServiceSpec(
            id="rollart/LocalSandboxes-v1",
            alias="local",
            entry_point="rollart_sandboxes.service:LocalSandboxService",
            summary="Isolated environments in sandboxes of this machine.",
        )
    ]


_COMMANDS: Final = (
    CommandSpec(
        name="serve-reward",
        entry_point="rollart_plugins.serverless.serve_command:app",
        summary="Serve one reward as an HTTP function.",
    ),
    CommandSpec(
        name="play",
        entry_point="rollart_testing.terminal:play",
        summary="Play an environment in the terminal.",
    ),
    CommandSpec(
        name="check",
        entry_point="rollart_testing.cli:check_command",
        summary="Check a plugin, a project folder or a wheel: static, runtime and semantic.",
    ),
    CommandSpec(
        name="diagnose",
        entry_point="rollart_view.cli.diagnose:diagnose",
        summary="Say what happened in a run: collapse, plateau, staleness and more; what to "
        "change.",
    ),
    CommandSpec(
        name="plot",
        entry_point="rollart_view.cli.plot:plot",
        summary="Draw the course of runs: reward, success, staleness, tokens a second, loss.",
    ),
    CommandSpec(
        name="export",
        entry_point="rollart_view.cli.export:export",
        summary="Write trajectories of runs as JSON lines, Parquet or ShareGPT's conversations.",
    ),
    CommandSpec(
        name="plan",
        entry_point="rollart_planner.cli:plan",
        summary="Show where a run's parts would go on a cluster, why, and the rates to expect.",
    ),
    CommandSpec(
        name="registry",
        entry_point="rollart_registry.cli:app",
        summary="Publish to a community registry, install from one, or run one.",
    ),
    CommandSpec(
        name="bench",
        entry_point="rollart_bench.cli:bench",
        summary="Run a benchmark, ours beside a peer's; without a name, list them.",
    ),
    CommandSpec(
        name="sandbox",
        entry_point="rollart_sandboxes.cli.sandbox:app",
        summary="See which boxes live, remove what killed runs left, find out which walls "
        "work here.",
    ),
    CommandSpec(
        name="build",
        entry_point="rollart_sandboxes.cli.build:build",
        summary="Build the image in which an environment runs with isolation: docker.",
    ),
)


@hookimpl
def rollart_commands() -> list[CommandSpec]:
    """Return the commands of RollArt's other packages."""
    return list(_COMMANDS)


_ENV_ADAPTERS: Final = (
    EnvAdapterSpec(
        id="rollart/Gymnasium-v1",
        alias="gymnasium",
        entry_point="rollart_plugins.adapters.gymnasium:GymnasiumAdapter",
        config="rollart_plugins.adapters.gymnasium:GymnasiumOptions",
        summary="Gymnasium's environments of Discrete or Text actions, as text.",
        package="gymnasium",
        examples=("FrozenLake-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1"),
    ),
    EnvAdapterSpec(
        id="rollart/ReasoningGym-v1",
        alias="reasoning-gym",
        entry_point="rollart_plugins.adapters.reasoning_gym:ReasoningGymAdapter",
        config="rollart_plugins.adapters.reasoning_gym:ReasoningGymOptions",
        summary="Reasoning Gym's datasets: one question, one answer, scored by the dataset.",
        package="reasoning-gym",
        examples=("leg_counting", "basic_arithmetic", "spell_backward"),
    ),
    EnvAdapterSpec(
        id="rollart/RollGem-v1",
        alias="roll-gem",
        entry_point="rollart_plugins.adapters.roll_gem:RollGemAdapter",
        config="rollart_plugins.adapters.roll_gem:RollGemOptions",
        summary="Classes in the interface of ROLL's agentic environments: module:Class.",
    ),
    EnvAdapterSpec(
        id="rollart/Verifiers-v1",
        alias="verifiers",
        entry_point="rollart_plugins.adapters.verifiers:VerifiersAdapter",
        config="rollart_plugins.adapters.verifiers:VerifiersOptions",
        summary="Tasksets of verifiers' v1 API, as agent tasks.",
        package="verifiers",
        kind="agent",
    ),
    EnvAdapterSpec(
        id="rollart/Gem-v1",
        alias="gem",
        entry_point="rollart_plugins.adapters.gem:GemAdapter",
        config="rollart_plugins.adapters.gem:GemOptions",
        summary="gem's games, Reasoning Gym and dataset environments (gem-llm).",
        package="gem-llm",
        examples=("game:GuessTheNumber-v0-easy", "game:Mastermind-v0-hard", "rg:leg_counting"),
    ),
    EnvAdapterSpec(
        id="rollart/SkyrlGym-v1",
        alias="skyrl-gym",
        entry_point="rollart_plugins.adapters.skyrl_gym:SkyrlGymAdapter",
        config="rollart_plugins.adapters.skyrl_gym:SkyrlGymOptions",
        summary="skyrl-gym's environments, over rows in SkyRL's dataset form.",
        package="skyrl-gym",
    ),
    EnvAdapterSpec(
        id="rollart/TextArena-v1",
        alias="textarena",
        entry_point="rollart_plugins.adapters.textarena:TextArenaAdapter",
        config="rollart_plugins.adapters.textarena:TextArenaOptions",
        summary="TextArena's games for one player.",
        package="textarena",
        examples=("GuessTheNumber-v0", "FrozenLake-v0-random", "TowerOfHanoi-v0"),
    ),
    EnvAdapterSpec(
        id="rollart/OpenEnv-v1",
        alias="openenv",
        entry_point="rollart_plugins.adapters.openenv:OpenEnvAdapter",
        config="rollart_plugins.adapters.openenv:OpenEnvOptions",
        summary="Sessions of a running OpenEnv server, over its WebSocket.",
        package="aiohttp",
    ),
)


@hookimpl
def rollart_env_adapters() -> list[EnvAdapterSpec]:
    """Return the built-in adapters of foreign environments."""
    return list(_ENV_ADAPTERS)
