"""Jobs in Redis: `job_store` gives the scripts types, `live_texts` has the text of running jobs, `late_answers` has
those that may be revised."""
