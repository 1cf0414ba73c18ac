"""SGLang plugins for machines without an accelerator; see the README beside it."""
