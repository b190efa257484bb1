"""Everything distributed, in the order the data flows: data, training, evaluation."""

from pipelines import credentials as credentials  # workers learn what URIs hide, whatever of this they import
