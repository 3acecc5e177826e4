"""Bad days and attacks of a fleet, and where each is tested.

the daemon is killed before each operation of its disk, and in the middle of each write, twice in a row
    tests/edge_node/agent/test_kills.py::test_a_device_that_is_killed_twice
    tests/edge_node/agent/test_processes.py::test_a_daemon_that_is_killed_in_every_trial_returns_to_its_own_files
a power cut at each write, with the recorded writes in every order that the file system allows; a full disk
    tests/edge_node/agent/test_bad_disks.py::test_a_power_cut_at_each_write
    tests/edge_node/agent/test_bad_disks.py::test_a_disk_that_is_full_from_each_write_on
    tests/edge_node/agent/test_processes.py::test_a_state_folder_on_a_full_disk
30 days offline; a clock 40 days ahead or 4,000 behind
    tests/edge_node/agent/test_bad_days.py::test_thirty_days_offline
    tests/edge_node/agent/test_bad_days.py::test_a_clock_40_days_ahead
    tests/edge_node/agent/test_bad_days.py::test_a_clock_4000_days_behind
    tests/edge_node/agent/test_bad_days.py::test_a_freeze_is_seen_by_a_clock_that_stands_in_the_past
a drip of 20 bytes a second: `download_too_slow`
    tests/edge_node/agent/test_bad_days.py::test_a_drip_of_20_bytes_a_second_is_cut_off
    tests/fleet/trust/test_attacks.py::test_a_drip
the controller is killed at each transition; control plane and database are restored from a backup; the database is away
    tests/fleet/operators/test_controller_crashes.py::test_killed_at_every_effect_twice_it_continues
    tests/fleet/operators/test_end_to_end.py::test_a_good_rollout_over_killed_controllers_and_a_bad_one_that_is_undone
    tests/fleet/operators/test_controller_crashes.py::test_database_and_files_from_an_hour_ago_publish_nothing_until_told
    tests/fleet/operators/test_restored_backup.py::test_what_happened_since_the_backup
    tests/e2e/identity/test_gateways.py::test_an_older_backup_of_the_control_plane_withdraws_nothing
    tests/fleet/operators/test_controller_crashes.py::test_a_database_that_goes_away_pauses_the_controller
    tests/fleet/server/test_database_away.py::test_postgres_is_away_and_returns
10,000 devices reconnect at once; with 5,000 over real sockets `python -m tests.bench rollouts`
    tests/bench/simulation/test_simulation.py::test_ten_thousand_devices_that_reconnect_come_evenly
a policy that passes lint and breaks 5 % of the answers: `errors_rose`
    tests/bench/simulation/test_simulation.py::test_five_percent_of_errors_stop_at_the_first_stage
    tests/edge_node/agent/test_trial.py::test_five_percent_errors_are_found_within_a_few_hundred_requests
    tests/edge_node/agent/test_daemon.py::test_a_policy_that_breaks_answers_is_undone_by_itself
a model that answers nonsense: `golden_answer_differs`; one too large for half of the cohort: `model_too_large`
    tests/edge_node/agent/test_processes.py::test_a_model_that_answers_nonsense_never_answers_a_user
    tests/edge_node/agent/test_agent.py::test_a_model_that_is_too_large_for_this_device_is_quarantined
    tests/fleet/operators/test_controller.py::test_a_model_that_half_the_cohort_cannot_hold_is_undone
rollback, freeze, mix and match, endless data, a wrong hash, an expired role: `metadata_rollback`, `metadata_frozen`,
`metadata_mixed`, `endless_data`, `bundle_altered`, `role_expired`
    tests/fleet/trust/test_attacks.py::test_rollback
    tests/fleet/trust/test_attacks.py::test_rollback_after_the_device_lost_metadata
    tests/fleet/trust/test_attacks.py::test_freeze
    tests/fleet/trust/test_attacks.py::test_mix_and_match
    tests/fleet/trust/test_attacks.py::test_endless_metadata
    tests/fleet/trust/test_attacks.py::test_a_wrong_hash
    tests/fleet/trust/test_attacks.py::test_an_expired_role
    tests/edge_node/agent/test_bad_days.py::test_wrong_content_is_refused_and_fetched_again
a replayed status, a foreign device's status, a stolen join token: `status_replayed`, `foreign_device`,
`join_token_used`
    tests/fleet/server/test_messages.py::test_a_replayed_report_is_refused
    tests/fleet/server/test_messages.py::test_a_report_for_another_device_is_refused
    tests/fleet/server/test_enrolment.py::test_a_stolen_token_enrols_no_device_beyond_its_uses
"""
