"""Pages of the documentation site (`make docs`): texts that live elsewhere in the repository, and references.

Nothing here is part of the package."""
