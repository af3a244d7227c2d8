"""DATA: names by which others know our series. One value, two names: they cannot differ.

`vllm:*` are those that dashboards for vLLM and Kubernetes endpoint pickers (the model-server
protocol of the Gateway API inference extension) read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Alias(NamedTuple):
    """`name` shows the family `source` (names without `_total` and the like).

    renamed: label -> its name there. dropped: label -> values whose series are not shown.
    """

    name: str
    source: str
    renamed: Mapping[str, str] = {}
    dropped: Mapping[str, frozenset[str]] = {}

    def labels(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Those of a series under this name; None: it is not shown."""
        if any(labels.get(label) in values for label, values in self.dropped.items()):
            return None
        shown = {self.renamed.get(label, label): value for label, value in labels.items()}
        return shown | {"engine": "0"}


_NO_SUCCESS = {"reason": frozenset({"refused", "lost"})}

ALIASES = (
    Alias("vllm:num_requests_running", "headrace_requests_running"),
    Alias("vllm:num_requests_waiting", "headrace_requests_waiting"),
    Alias("vllm:kv_cache_usage_perc", "headrace_kv_usage_ratio"),
    Alias("vllm:num_preemptions", "headrace_preemptions"),
    Alias("vllm:prompt_tokens", "headrace_prompt_tokens"),
    Alias("vllm:prompt_tokens_cached", "headrace_cached_tokens"),
    Alias("vllm:generation_tokens", "headrace_generation_tokens"),
    Alias("vllm:prefix_cache_queries", "headrace_prefix_queried_tokens"),
    Alias("vllm:prefix_cache_hits", "headrace_cached_tokens"),
    Alias(
        "vllm:request_success",
        "headrace_requests_finished",
        {"reason": "finished_reason"},
        _NO_SUCCESS,
    ),
    Alias("vllm:iteration_tokens_total", "headrace_step_tokens"),
    Alias("vllm:time_to_first_token_seconds", "headrace_ttft_seconds"),
    Alias("vllm:inter_token_latency_seconds", "headrace_inter_token_seconds"),
    Alias("vllm:time_per_output_token_seconds", "headrace_inter_token_seconds"),
    Alias("vllm:request_time_per_output_token_seconds", "headrace_time_per_output_token_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "headrace_e2e_seconds"),
    Alias("vllm:request_queue_time_seconds", "headrace_queue_seconds"),
    Alias("vllm:request_inference_time_seconds", "headrace_inference_seconds"),
    Alias("vllm:request_prefill_time_seconds", "headrace_prefill_seconds"),
    Alias("vllm:request_decode_time_seconds", "headrace_decode_seconds"),
    Alias("vllm:request_prompt_tokens", "headrace_request_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "headrace_request_output_tokens"),
    Alias("vllm:request_max_num_generation_tokens", "headrace_request_longest_tokens"),
    Alias("vllm:request_params_max_tokens", "headrace_request_max_tokens"),
    Alias("vllm:request_params_n", "headrace_request_choices"),
)

BY_SOURCE: Mapping[str, tuple[Alias, ...]] = {
    alias.source: tuple(other for other in ALIASES if other.source == alias.source)
    for alias in ALIASES
}
