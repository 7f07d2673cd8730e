"""RoBERTa: its layers are BERT's."""

from smp.nn.huggingface.bert import family_of

FAMILY = family_of("roberta", "transformers.models.roberta.modeling_roberta", "RobertaLayer", ("roberta",))
translate_hf_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_hf_state_dict_to_smdistributed_roberta = FAMILY.hf_to_smp
translate_state_dict_to_smdistributed = FAMILY.hf_to_smp
translate_state_dict_to_hf_roberta = FAMILY.smp_to_hf
