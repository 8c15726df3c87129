"""What `kvasir up` was asked for: by flags, the environment and a settings file, all by the tables of options."""
