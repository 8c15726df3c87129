"""The settings of `kvasir up`: by flags, the environment and a settings file, all by the tables of options."""
