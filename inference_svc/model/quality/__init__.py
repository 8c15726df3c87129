"""What a KV policy costs a model: texts and questions, a measurement under each rung, and the judgement."""
