"""What stopped newcomers on their first days, and the test that each now has, or why it has none."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
EDGES = {
    "1: a store that is away lets a side call replace a memory": (
        "test_a_memory_that_cannot_be_read_is_not_replaced_without_the_callers_word",
        "test_appending_to_what_cannot_be_read_is_refused",
    ),
    "2: commands on a copied home act on the original": ("test_commands_on_a_copied_home_do_not_reach_the_original",),
    "3: no namespaces where nothing listens on TCP": (
        "test_a_new_namespace_gets_a_credential_of_the_engine_with_which_it_is_started",
    ),
    "4: a full disk looks well": (
        "test_a_full_disk_and_memories_that_are_not_stored_are_reported",
        "test_a_home_of_the_background_is_taken_over_after_a_kill_and_goes_down",
        "test_a_script_ends_with_1_when_its_turn_is_not_stored",
    ),
    "5: the README's curl is not remembered": (
        "test_the_curl_of_the_readme_is_remembered",
        "test_append_takes_only_what_follows_the_last_reply",
    ),
    "6: forced tool calls are refused": ("test_a_forced_call_is_of_a_tool_requested_and_fits_its_schema",),
    "7: settings that clients send unasked are refused": (
        "test_a_field_that_changes_no_meaning_is_ignored_and_reported",
    ),
    "8: no embeddings, no aliases": (
        "test_an_embedding_beside_others_and_beside_streams_is_the_one_alone",
        "test_an_alias_answers_for_its_model_and_is_listed",
    ),
    "9: conversations without names flood the list": (
        "test_ls_begins_with_the_last_used_and_leaves_out_agents_without_names",
        "test_titles_are_first_words_or_a_label_and_are_searched_and_reading_them_is_no_use",
    ),
    "10: nobody says why nothing was reused": (
        "test_an_answer_reports_what_was_reused_and_where_its_prompt_parted_from_the_memory",
        "test_a_talk_reports_where_its_prompt_parted_from_the_memory",
    ),
    "11: a README's first prompt has no end": "the example is a chat now; the client's own tests run its calls",
    "12: nothing is published, and no page says how to depend on a client": (
        "test_a_client_is_built_from_its_own_folder",
        "test_the_page_of_a_client_has_one_line_and_a_program_that_calls_ada",
    ),
    "13: old clients do not run with new stubs": ("test_every_version_of_the_changelog_lists_the_changes_of_clients",),
    "14: Java warns of a channel option, and `mvn package install` fails": "it is Netty's word about Unix sockets, and "
    "changes nothing; `mvn install` packages, and Maven's source plugin refuses a second round in one line",
    "15: up goes on without HTTP where the port is taken": (
        "test_a_home_of_the_background_is_taken_over_after_a_kill_and_goes_down",
        "test_an_up_whose_gateways_port_is_taken_while_it_starts_takes_the_next_one",
    ),
    "16: more KV memory than the machine has is taken": (
        "test_a_size_that_others_leave_no_room_for_is_refused_before_anything_is_loaded",
    ),
    "17: exit codes differ from command to command": (
        "test_without_services_each_command_ends_as_the_table_of_exit_codes_has_it",
        "test_an_unknown_option_ends_each_command_with_2_and_json",
        "test_a_refusal_names_what_is_wrong",
        "test_a_home_of_the_background_is_taken_over_after_a_kill_and_goes_down",
    ),
    "18: keys ls and store check need a store that is stopped": ("test_check_walks_a_store_that_does_not_run",),
    "19: chat breaks words, and refuses a question without a hint": (
        "test_a_reply_breaks_no_word_at_the_edge_of_a_terminal",
        "test_a_refusal_names_what_is_wrong",
    ),
    "20: scenarios answer in regular expressions": (
        "test_what_is_wrong_is_named_with_its_line",
        "test_a_report_is_written_of_the_newest_run",
    ),
    "21: a first reply that cannot be handed over ends the move, and a moved turn is followed by settings alone": (
        "test_the_command_takes_the_turn_along",
        "test_a_first_turn_is_waited_for_and_the_command_reports_it",
        "test_a_live_move_needs_nothing_but_the_pairing",
    ),
    "22: chat waits for a hung engine without end": (
        "test_an_engine_that_hangs_is_distinguished_from_one_that_does_not_run",
    ),
    "23: up.json has addresses without a scheme": ("test_the_gateway_is_a_service_like_the_others",),
    "24: the audit lists each turn": ("test_the_audit_shows_what_needs_attention_and_a_call_once",),
    "25: a transfer's line counts blobs": ("test_a_first_turn_is_waited_for_and_the_command_reports_it",),
    "what a newcomer comes for takes too many steps": (
        "test_a_newcomers_task_takes_at_most_five_commands",
        "test_an_example_of_two_homes_prints_what_it_promises_and_leaves_nothing",
    ),
    "a backup is a copy by hand": (
        "test_a_restored_home_equals_the_old_one",
        "test_an_agent_of_a_restored_home_goes_on_token_for_token",
        "test_a_damaged_backup_is_refused_by_file_and_makes_no_home",
        "test_a_sealed_namespace_stays_sealed",
        "test_no_link_in_the_backups_folder_is_followed",
        "test_a_part_is_restored_of_a_damaged_backup_and_missing_files_are_listed",
        "test_a_restored_home_reports_that_it_takes_the_old_ones_place_or_is_another",
    ),
    "Macs that are paired need addresses for a live move": (
        "test_a_live_move_needs_nothing_but_the_pairing",
        "test_a_peer_gets_no_more_at_the_engines_door_than_its_pairing_gives",
    ),
}


def test_every_numbered_edge_is_here() -> None:
    assert [edge.partition(": ")[0] for edge in EDGES][:25] == [str(number) for number in range(1, 26)]


def test_every_edge_has_a_test_that_exists_or_a_reason() -> None:
    there = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = {name for tests in EDGES.values() if isinstance(tests, tuple) for name in tests}
    assert named - there == set()
    assert all(EDGES.values())
