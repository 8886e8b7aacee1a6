package transformer

import (
	"strings"

	"github.com/trainerrank/engine/internal/strictjson"
)

// isNeutral: null, false, 0, and whatever is empty, say that a feature is off.
func isNeutral(v strictjson.Value) bool {
	switch v.Kind() {
	case strictjson.Null:
		return true
	case strictjson.Bool:
		b, _ := v.Bool()
		return !b
	case strictjson.Number:
		x, err := v.Float()
		return err == nil && x == 0
	case strictjson.String:
		s, _ := v.Text()
		return s == ""
	case strictjson.Array:
		return len(v.Items()) == 0
	case strictjson.Object:
		return len(v.Members()) == 0
	}
	return false
}

func isNull(v strictjson.Value) bool { return v.Kind() == strictjson.Null }

// isOne: null or 1, for factors.
func isOne(v strictjson.Value) bool {
	x, err := v.Float()
	return isNull(v) || err == nil && x == 1
}

func isNullOrTrue(v strictjson.Value) bool {
	b, err := v.Bool()
	return isNull(v) || err == nil && b
}

func oneOf(names ...string) func(strictjson.Value) bool {
	return func(v strictjson.Value) bool {
		s, err := v.Text()
		if err != nil {
			return isNull(v)
		}
		for _, n := range names {
			if strings.EqualFold(s, n) {
				return true
			}
		}
		return false
	}
}

// refusal says why a key is refused unless its value is harmless (nil: [isNeutral]).
type refusal struct {
	why, hint string
	harmless  func(strictjson.Value) bool
}

const (
	whyExperts     = "experts"
	whyRecurrent   = "recurrent layers (gated delta net)"
	whyMuP         = "a multiplier on activations, scores or logits"
	whySoftcap     = "a soft cap (tanh) on scores or logits"
	whyQuantised   = "quantised weights"
	whyRotaryOrder = "another pairing or range of rotary positions"
	whyLatent      = "latent attention (compressed keys and values)"
	hintQuantised  = "use the folder that holds the weights in bf16, f16 or f32"
)

// refusals are keys, at the top or in rope parameters, that stand for arithmetic which a Spec cannot say. A family
// that can run one of them reads it before, and it is then not looked at here.
var refusals = map[string]refusal{
	"attn_logit_softcapping":  {why: whySoftcap, harmless: isNull},
	"final_logit_softcapping": {why: whySoftcap, harmless: isNull},
	"logit_softcapping":       {why: whySoftcap, harmless: isNull},
	"attn_logit_softcap":      {why: whySoftcap, harmless: isNull},
	"final_logit_softcap":     {why: whySoftcap, harmless: isNull},

	"use_bidirectional_attention": {why: "attention to later tokens"},
	"is_causal":                   {why: "attention to later tokens", harmless: isNullOrTrue},
	"prefix_lm":                   {why: "attention to later tokens"},
	"is_encoder_decoder":          {why: "an encoder beside the decoder"},
	"add_cross_attention":         {why: "attention to an encoder"},
	"attention_chunk_size":        {why: "attention in chunks"},
	"attention_sinks":             {why: "attention sinks"},
	"alibi":                       {why: "positions as biases on scores (ALiBi)"},
	"use_alibi":                   {why: "positions as biases on scores (ALiBi)"},
	"position_embedding_type":     {why: "positions other than rotary ones", harmless: oneOf("rope", "rotary", "")},
	"no_rope_layers":              {why: "layers without positions"},
	"no_rope_layer_interval":      {why: "layers without positions"},
	"rope_interleaved":            {why: whyRotaryOrder},
	"rope_interleave":             {why: whyRotaryOrder},
	"partial_rotary_factor":       {why: whyRotaryOrder, hint: "the families that are run rotate whole heads", harmless: isOne},
	"rotary_pct":                  {why: whyRotaryOrder, harmless: isOne},
	"rotary_dim":                  {why: whyRotaryOrder, harmless: isNull},
	"mrope_section":               {why: "positions in three dimensions"},
	"mrope_interleaved":           {why: "positions in three dimensions"},
	"attention_factor":            {why: whyMuP, harmless: isOne},
	"clip_qkv":                    {why: "clipping of q, k and v", harmless: isNull},
	"qk_clip":                     {why: "clipping of q and k", harmless: isNull},
	"use_qk_norm":                 {why: "norms on q and k that this family does not have"},
	"qk_norm":                     {why: "norms on q and k that this family does not have"},
	"qk_layernorm":                {why: "norms on q and k that this family does not have"},
	"use_parallel_residual":       {why: "attention and feed-forward side by side"},
	"parallel_attn":               {why: "attention and feed-forward side by side"},
	"norm_type":                   {why: "another norm", harmless: oneOf("rmsnorm", "rms_norm", "rms", "")},
	"pruned_heads":                {why: "heads taken out of the weights"},
	"text_config":                 {why: "another model's configuration inside this one"},
	"language_config":             {why: "another model's configuration inside this one"},
	"llm_config":                  {why: "another model's configuration inside this one"},
	"block_configs":               {why: "layers that differ in size"},
	"per_layer_config":            {why: "layers that differ in size"},
	"attn_config":                 {why: "attention described in another family's terms"},
	"ffn_config":                  {why: "a feed-forward described in another family's terms"},
	"moe_config":                  {why: whyExperts},
	"ssm_cfg":                     {why: "recurrent layers (state space)"},

	"logit_scale":             {why: whyMuP, harmless: isOne},
	"logits_scaling":          {why: whyMuP, harmless: isOne},
	"embedding_multiplier":    {why: whyMuP, harmless: isOne},
	"residual_multiplier":     {why: whyMuP, harmless: isOne},
	"attention_multiplier":    {why: whyMuP, harmless: isNull}, // replaces head_dim^-0.5, so 1 is not neutral
	"attention_in_multiplier": {why: whyMuP, harmless: isOne},
	"lm_head_multiplier":      {why: whyMuP, harmless: isOne},
	"scale_emb":               {why: whyMuP, harmless: isOne},
	"scale_depth":             {why: whyMuP, harmless: isNull},
	"dim_model_base":          {why: whyMuP, harmless: isNull},
	"scale_attn_weights":      {why: whyMuP, harmless: isNullOrTrue},

	"quantization_config": {why: whyQuantised, hint: hintQuantised},
	"compression_config":  {why: whyQuantised, hint: hintQuantised},
	"quantization":        {why: whyQuantised, hint: hintQuantised},

	"num_experts":                     {why: whyExperts},
	"num_local_experts":               {why: whyExperts},
	"n_routed_experts":                {why: whyExperts},
	"n_shared_experts":                {why: whyExperts},
	"num_experts_per_tok":             {why: whyExperts},
	"moe_intermediate_size":           {why: whyExperts},
	"shared_expert_intermediate_size": {why: whyExperts},
	"mlp_only_layers":                 {why: whyExperts},
	"decoder_sparse_step":             {why: whyExperts},
	"first_k_dense_replace":           {why: whyExperts},

	"full_attention_interval": {why: whyRecurrent},
	"linear_num_key_heads":    {why: whyRecurrent},
	"linear_num_value_heads":  {why: whyRecurrent},
	"linear_key_head_dim":     {why: whyRecurrent},
	"linear_value_head_dim":   {why: whyRecurrent},
	"linear_conv_kernel_dim":  {why: whyRecurrent},
	"mamba_d_state":           {why: "recurrent layers (state space)"},

	"kv_lora_rank": {why: whyLatent},
	"q_lora_rank":  {why: whyLatent},
}

// ignored says that a key changes nothing in a forward over whole sequences: training, generation, bookkeeping.
func ignored(key string) bool {
	for _, tail := range []string{"_dropout", "_pdrop", "_dropout_prob", "_token_id", "_token_ids", "_token_index"} {
		if strings.HasSuffix(key, tail) {
			return true
		}
	}
	return harmless[key]
}

var harmless = func() map[string]bool {
	out := map[string]bool{}
	for _, list := range []string{
		// where the file comes from
		`_name_or_path name_or_path architectures model_type transformers_version transformers.js_config auto_map _commit_hash
		is_llama_config is_mistral_config unsloth_version unsloth_fixed base_model_name base_model_name_or_path license author language tags`,
		// memory, speed, return values
		`use_cache cache_implementation cache_config _attn_implementation attn_implementation _attn_implementation_autoset
		_attn_implementation_internal attention_implementation _flash_attn_2_enabled use_flash_attn use_flash_attention_2 use_flash_attention
		use_sdpa return_dict output_attentions output_hidden_states torchscript use_bfloat16 fp16 bf16 fp32 dtype torch_dtype low_cpu_mem_usage
		gradient_checkpointing use_gradient_checkpointing chunk_size_feed_forward pretraining_tp tensor_parallel sequence_parallel
		num_logits_to_keep logits_to_keep experts_implementation _experts_implementation max_window_layers disable_exllama`,
		// training
		`initializer_range initializer_factor initializer_cutoff_factor dropout use_dropout layerdrop neftune_noise_alpha label_smoothing
		router_aux_loss_coef aux_loss_alpha output_router_logits keys_to_ignore_at_inference`,
		// tokens and lengths
		`vocab_file tokenizer_class tokenizer_path tokenizer_model_max_length model_max_length max_sequence_length max_seq_len seq_length
		max_length min_length pad_token_idx image_seq_length mm_tokens_per_image prefix sep_token eos_token bos_token`,
		// generation, as old files held it
		`do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p min_p typical_p repetition_penalty
		length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences output_scores return_dict_in_generate
		remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens bad_words_ids generation_config`,
		// other heads and other uses of the same class
		`is_decoder tie_encoder_decoder cross_attention_hidden_size problem_type finetuning_task id2label label2id num_labels task_specific_params
		tf_legacy_loss summary_type summary_use_proj classifier_activation`,
	} {
		for _, key := range strings.Fields(list) {
			out[key] = true
		}
	}
	return out
}()

// whyNotFamily says what a model_type that is not run would need.
func whyNotFamily(kind string) string {
	for _, k := range []struct{ kinds, why string }{
		{"qwen3_next qwen3_5_moe qwen3_5_moe_text", whyRecurrent + " and " + whyExperts},
		{"qwen3_5 qwen3_5_text", whyRecurrent},
		{"qwen3_moe qwen2_moe qwen3_vl_moe qwen3_vl_moe_text qwen3_omni_moe mixtral dbrx olmoe phimoe gpt_oss granitemoe minimax_m2 ernie4_5_moe glm4_moe " +
			"dots1 hunyuan_v1_moe flex_olmo bailing_moe arctic jetmoe llama4 llama4_text", whyExperts},
		{"deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 glm4_moe_lite longcat_flash minicpm3 youtu", whyLatent + " and, in most, " + whyExperts},
		{"mamba mamba2 falcon_mamba rwkv recurrent_gemma xlstm kimi_linear jamba bamba zamba zamba2 nemotron_h falcon_h1 granitemoehybrid lfm2 lfm2_moe minimax plamo2", "recurrent or convolutional layers"},
		{"gemma2", "soft caps on scores and logits"},
		{"gemma", "the first Gemma, for which no golden data proves a mapping"},
		{"gemma3n gemma3n_text", "per-layer embeddings and shared keys and values"},
		{"granite minicpm", whyMuP},
		{"cohere cohere2", whyMuP + ", and other norms"},
		{"olmo olmo2 olmo3 glm glm4 nemotron stablelm starcoder2 gpt2 gpt_neo gpt_neox gptj opt bloom falcon mpt phi persimmon exaone exaone4 codegen " +
			"xglm bert roberta modernbert", "other norms, residual order or positions"},
		{"phi3 phi4mm", "fused projections and long rope"},
		{"chatglm qwen internlm internlm2 baichuan", "fused projections or positions of its own"},
		{"smollm3", "layers without positions"},
		{"ministral ministral3 apertus seed_oss arcee helium", "no golden data proves a mapping for it"},
		{"qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen2_5_omni qwen3_vl qwen3_vl_text", "a vision-language model with positions in three dimensions"},
		{"mistral3 llava llava_next idefics2 idefics3 smolvlm paligemma pixtral internvl mllama aya_vision", "a vision-language model"},
		{"t5 mt5 umt5 t5gemma bart mbart pegasus m2m_100 whisper", "an encoder beside the decoder"},
	} {
		for _, name := range strings.Fields(k.kinds) {
			if name == kind {
				return k.why
			}
		}
	}
	return "the family is not known"
}

func whyNotLayer(kind string) string {
	switch kind {
	case "linear_attention":
		return whyRecurrent
	case "chunked_attention":
		return "attention in chunks"
	case "mamba", "mamba2", "recurrent", "conv", "attention_free":
		return "recurrent or convolutional layers"
	}
	return "the kind of layer is not known"
}

// whyNotRope says what a rope type that is not run does, and what can be done.
func whyNotRope(kind string) (why, hint string) {
	const implemented = "default, linear and llama3 are run"
	const longer = "; if it was added for longer contexts, the model without it is the same up to its original context"
	switch kind {
	case "yarn":
		return "frequencies blended by a ramp and scores rescaled (YaRN)", implemented + longer
	case "dynamic", "ntk", "dynamic_ntk":
		return "frequencies that depend on the length of the sequence (NTK)", implemented + longer
	case "longrope", "su":
		return "frequencies from tables that depend on the length of the sequence (LongRoPE)", implemented
	case "mrope", "xdrope":
		return "positions in several dimensions", implemented
	case "proportional":
		return "frequencies on a part of the head", implemented
	}
	return "the rope type is not known", implemented
}
