"""What the servers behind a tier lack themselves: the cases of this suite that fail there, by kind and reason.

A name stands for all cases of a test; it may have its module before it, and parameters behind. A listed case that
passes fails, so that the list stays true.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_VECTORS: Final = (
    "test_a_long_list",
    "test_base64_is_the_same_vectors_as_little_endian_float32",
    "test_embeddings_which_the_client_requests_as_base64",
    "test_fields_that_change_nothing_are_accepted",
    "test_floats_are_the_default",
    "test_one_text",
    "test_several_texts_in_their_order",
    "test_the_models_own_number_of_dimensions_may_be_named",
    "test_token_ids_and_lists_of_them",
    "test_usage_is_the_sum_of_the_texts",
)
_TOOLS: Final = (
    "test_a_call_is_parsed_into_a_class",
    "test_a_demanded_call_is_made",
    "test_a_function_without_parameters_is_called_with_an_empty_object",
    "test_a_tool_is_called_and_its_result_is_read",
    "test_a_tool_that_cannot_be_held_is_no_concern_of_another_s_call",
    "test_a_tool_that_must_be_called_and_cannot_be_held_is_400",
    "test_an_offered_tool_that_cannot_be_held_is_loosened_and_named",
    "test_arguments_that_are_a_list_are_400_where_a_call_is_required",
    "test_call_ids_differ_from_request_to_request",
    "test_calls_have_ids_of_their_own",
    "test_each_tool_keeps_its_own_definitions",
    "test_one_call_at_most_unless_they_may_be_parallel",
    "test_only_an_allowed_tool_is_called",
    "test_streamed_and_whole_calls_agree",
    "test_streamed_calls_of_several_choices",
    "test_the_result_of_a_call_may_be_sent_back",
    "test_the_stream_helper_builds_calls",
    "test_tools_and_a_schema_together",
)
_TOKENS: Final = ("test_a_chat_has_as_many_tokens_as_its_usage_says", "test_tokens_become_their_text_again")
_SCHEMAS: Final = (
    "test_a_json_object_is_an_object",
    "test_a_json_object_with_a_schema_obeys_it",
    "test_an_answer_is_parsed_into_a_class",
    "test_an_answer_obeys_its_schema",
    "test_an_odd_schema_is_obeyed_too",
    "test_chat.test_the_token_limit_ends_the_answer",
    "test_each_event_is_whole_utf8",
    "test_schemas_of_other_forms",
    "test_the_token_limit_ends_a_stream",
)
LACKS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "llama_server": {
        "no usage in streams: the prompt's tokens are estimated for the books, and 0 for the client": (
            "test_a_stored_response_is_read_continued_and_deleted",
            "test_chat.test_an_answer_has_openais_fields_and_no_others",
        ),
        "no JSON answers: `without` names them, so that they are a 400": (*_SCHEMAS,),
        "its logprobs have no bytes of the tokens": (
            "test_logprobs_of_each_choice",
            "test_logprobs_spell_the_answer",
            "test_streamed_logprobs_spell_the_answer",
        ),
        "500 for the role `developer`, for parts that are refusals and for messages without content": (
            "test_an_earlier_call_with_odd_arguments_is_no_failure",
            "test_forms_of_messages[developer]",
            "test_forms_of_messages[refusal-part]",
        ),
        "its stream ends without a word where a prompt is too long": (
            "test_a_prompt_that_does_not_fit_is_400",
            "test_an_invalid_prompt_is_400[None1]",
        ),
        "no vectors: another server, or another start of it, makes them": (*_VECTORS,),
        "no tools: `without` names them, so that they are a 400": (
            *_TOOLS,
            "test_a_call_is_made_or_not",
            "test_logprobs_of_a_call",
            "test_no_call_is_made_if_none_is_allowed",
        ),
        "it counts no tokens at the paths of vLLM: 400": _TOKENS,
        "500 for prompts of token ids": (
            "test_an_invalid_prompt_is_400[None0]",
            "test_each_prompt_has_n_choices[1-lists]",
            "test_each_prompt_has_n_choices[1-tokens]",
            "test_each_prompt_has_n_choices[2-lists]",
            "test_each_prompt_has_n_choices[2-tokens]",
            "test_tokens_of_a_prompt_are_counted",
        ),
        "it ignores `max_completion_tokens`, which the limit of a response becomes": (
            "test_an_answer_that_reaches_its_limit_is_incomplete",
        ),
    },
    "trtllm": {
        "the stand-in repeats its last message, so that limits, stops, seeds, schemas and calls show nothing": (
            *_TOOLS,
            *_SCHEMAS,
            "test_a_prompt_that_does_not_fit_is_400",
            "test_a_seed_repeats_a_sampled_answer",
            "test_a_stop_string_ends_the_answer",
            "test_a_stop_string_ends_the_answer_and_is_not_part_of_it",
            "test_a_stop_string_never_leaks_into_a_stream",
            "test_a_stored_response_is_read_continued_and_deleted",
            "test_an_invalid_format_is_400[stream-bad-reference]",
            "test_an_invalid_format_is_400[stream-bad-type]",
            "test_an_invalid_format_is_400[whole-bad-reference]",
            "test_an_invalid_format_is_400[whole-bad-type]",
            "test_an_invalid_prompt_is_400[None1]",
            "test_choices_with_one_seed_differ",
            "test_tokens_of_a_prompt_are_counted",
            "test_usage_of_a_completion",
        ),
        "the kind has no tensors for logprobs, `logit_bias`, `min_p` and token ids: 400": (
            "test_a_bias_forces_and_bans_tokens",
            "test_each_prompt_has_n_choices[1-lists]",
            "test_each_prompt_has_n_choices[1-tokens]",
            "test_each_prompt_has_n_choices[2-lists]",
            "test_each_prompt_has_n_choices[2-tokens]",
            "test_fields_that_change_no_shape_are_accepted[vllm]",
            "test_logprobs_are_parallel_lists",
            "test_logprobs_of_a_call",
            "test_logprobs_of_each_choice",
            "test_logprobs_spell_the_answer",
            "test_streamed_logprobs_of_a_completion",
            "test_streamed_logprobs_spell_the_answer",
        ),
        "its tier has no `tokenizer_file`: 400": _TOKENS,
        "no vectors: another server, or another start of it, makes them": (*_VECTORS,),
    },
    "vllm": {
        "no tools: its model's template knows none, so that `without` names them": (
            *_TOOLS,
            "test_a_call_is_made_or_not",
            "test_an_odd_schema_is_obeyed_too",
            "test_logprobs_of_a_call",
            "test_no_call_is_made_if_none_is_allowed",
        ),
        "no vectors: another server makes them": _VECTORS,
        "its `/detokenize` makes an empty text of a token that it does not have": (
            "test_a_token_beyond_the_vocabulary_is_400",
        ),
        "its model writes more than these tests ask for": (
            "test_a_stream_builds_the_whole_answer",
            "test_the_answer_is_that_of_a_chat",
            "test_the_stream_helper_builds_the_whole_answer",
        ),
    },
}


def lack_of(kind: str, module: str, case: str) -> str:
    """Return why a case cannot pass; "" if it must. `case`: its name, with a gap where the surface stood."""
    test, _, parameters = case.partition("[")
    chosen = "-".join(filter(None, parameters.removesuffix("]").split("-")))
    names = {test, f"{module}.{test}", f"{test}[{chosen}]"}
    return next((reason for reason, listed in LACKS.get(kind, {}).items() if names & set(listed)), "")
