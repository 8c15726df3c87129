"""`kvasir bench quality`: what each KV policy costs a model, on shipped material or a user's text."""
