"""State dicts of GPT-J."""

from smp.coming import to_come

__getattr__ = to_come(
    __name__,
    (
        "translate_hf_state_dict_to_smdistributed",
        "translate_hf_state_dict_to_smdistributed_gptj",
        "translate_hf_gptj_state_dict_to_smdistributed_gptj",
        "translate_state_dict_to_hf_gptj",
    ),
    "the transformer family",
)
