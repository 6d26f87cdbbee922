"""Values that describe preprocessing: image specs, stages, pipelines, random keys, and folded programs."""
