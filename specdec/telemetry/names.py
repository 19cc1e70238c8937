"""Every span name and attribute key, in one place.

One trace per request. Its spans, outermost first:

    specdec.v1.OrchestratorService/Generate   orchestrator, one per call
      draft                                   orchestrator, one per round that drafts
        propose                               draft service, its part of the round
      verify                                  orchestrator, one per round
        target.verify                         target service, its part of the round
      rollback                                orchestrator, when drafts were rejected

Steps serve many requests at once, so each is a trace of its own whose span
links to the spans of its batch: `target.step` and `draft.step`.

Prompts and outputs never become attributes, nor do token ids or probabilities.
"""

from __future__ import annotations

from typing import Final

# Spans.
GENERATE: Final = "specdec.v1.OrchestratorService/Generate"
DRAFT: Final = "draft"
VERIFY: Final = "verify"
ROLLBACK: Final = "rollback"
PROPOSE: Final = "propose"
TARGET_VERIFY: Final = "target.verify"
TARGET_STEP: Final = "target.step"
DRAFT_STEP: Final = "draft.step"

# The request and its rounds.
REQUEST_ID: Final = "specdec.request_id"
SEQUENCE_ID: Final = "specdec.sequence_id"
EPOCH: Final = "specdec.epoch"
ROUND_INDEX: Final = "specdec.round_index"
NUM_ROUNDS: Final = "specdec.num_rounds"
BASE_LENGTH: Final = "specdec.base_length"
RETAINED_LENGTH: Final = "specdec.retained_length"
NUM_SPECULATIVE_TOKENS: Final = "specdec.num_speculative_tokens"
NUM_DRAFT_TOKENS: Final = "specdec.num_draft_tokens"
NUM_ACCEPTED_TOKENS: Final = "specdec.num_accepted_tokens"
NUM_OUTPUT_TOKENS: Final = "specdec.num_output_tokens"
NUM_REJECTED_TOKENS: Final = "specdec.num_rejected_tokens"
DRAFTER: Final = "specdec.drafter"
ACCEPTANCE: Final = "specdec.acceptance"
ACCEPTANCE_RATE: Final = "specdec.acceptance_rate"
REDRAW_MISMATCH: Final = "specdec.redraw_mismatch"
FALLBACK_REASON: Final = "specdec.fallback_reason"
STATUS: Final = "specdec.status"

# Engine steps. Times in ms.
STEP_INDEX: Final = "specdec.step_index"
BATCH_SIZE: Final = "specdec.batch_size"
NUM_TOKENS: Final = "specdec.num_tokens"
NUM_PREFILL_TOKENS: Final = "specdec.num_prefill_tokens"
QUEUE_MS: Final = "specdec.queue_ms"
STEP_MS: Final = "specdec.step_ms"
TIME_TO_FIRST_TOKEN_MS: Final = "specdec.time_to_first_token_ms"

# OpenTelemetry's conventions for generative AI, on the Generate server span.
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"

# OpenTelemetry's conventions for RPCs.
RPC_SYSTEM: Final = "rpc.system"
RPC_SERVICE: Final = "rpc.service"
RPC_METHOD: Final = "rpc.method"
RPC_GRPC_STATUS_CODE: Final = "rpc.grpc.status_code"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

# Metadata keys.
TRACEPARENT: Final = "traceparent"
TRACE_ID: Final = "specdec-trace-id"
