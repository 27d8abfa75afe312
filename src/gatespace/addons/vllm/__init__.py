"""vLLM as sampler of the student's responses, as teacher, and as engine of an evaluation."""
