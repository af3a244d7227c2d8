"""How full a worker's KV cache is, by the page of metrics that the worker shows."""

from __future__ import annotations

from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

# As the model-server protocol of the Gateway API inference extension names them: a share, 0 to 1.
# headrace has vLLM's name beside its own; older ones of vLLM had another.
NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")


def read_kv_usage(page: bytes) -> float | None:
    """The share of KV memory that is taken, of several engines their mean; None: it says none."""
    lines = page.decode(errors="replace").splitlines()
    for name in NAMES:
        own = "".join(f"{line}\n" for line in lines if line.startswith((f"{name}{{", f"{name} ")))
        try:
            families = [*text_string_to_metric_families(own)]
        except ValueError:
            continue
        values = [sample.value for family in families for sample in family.samples]
        if values and all(0 <= value <= 1 for value in values):
            return fmean(values)
    return None
