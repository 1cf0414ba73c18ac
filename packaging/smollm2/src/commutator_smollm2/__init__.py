"""SmolLM2-135M-Instruct as a GGUF file; `source: package:commutator_smollm2` finds it."""
