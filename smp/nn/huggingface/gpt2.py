"""State dicts of GPT-2."""

from smp.coming import to_come

__getattr__ = to_come(
    __name__,
    (
        "translate_hf_state_dict_to_smdistributed",
        "translate_hf_state_dict_to_smdistributed_gpt2",
        "translate_state_dict_to_hf_gpt2",
    ),
    "the transformer family",
)
