//! The tests that every [`Runtime`] must pass, on real containers.
//!
//! A crate that has a runtime implements [`Harness`] and calls
//! [`runtime_conformance!`](macro@crate::runtime_conformance) in a test file. Every check gets a
//! [`Stage`]: a random instance and a directory. It empties both again, even after a panic, so
//! checks can run in parallel with each other and with other programs of the host.

mod commands;
mod life;
mod logs;
mod stage;
mod surroundings;
mod terminals;

use std::sync::Arc;

use conman_core::naming::Instance;
use conman_runtime::Runtime;

pub use commands::*;
pub use life::*;
pub use logs::*;
pub use stage::{Running, Stage};
pub use surroundings::*;
pub use terminals::*;

/// Creates the runtimes under test.
pub trait Harness: Send + Sync + 'static {
    /// Creates a runtime of this instance, as a restarted daemon would.
    fn runtime(&self, instance: &Instance) -> Arc<dyn Runtime>;

    /// Creates a runtime that carries out `start` but never answers it in time.
    fn runtime_that_loses_answers_of_start(&self, instance: &Instance) -> Arc<dyn Runtime>;

    /// An image with `/bin/sh` and the usual small programs.
    fn image(&self) -> String;

    /// Whether the log separates a program's two outputs. If not, it must show them in the order
    /// in which they were written.
    fn keeps_outputs_apart(&self) -> bool {
        true
    }

    /// Whether a program may run in a terminal. If not, requests for one are refused as
    /// unsupported.
    fn has_terminals(&self) -> bool {
        true
    }

    /// Whether a terminal can get another size than that of its begin. If not, requests for one have no effect.
    fn resizes_terminals(&self) -> bool {
        true
    }

    /// Whether terminals of commands are kept. If not, requests are refused likewise.
    fn keeps_commands(&self) -> bool {
        true
    }
}

/// Makes a test of each check. `$harness` is an expression of type `Result<H, String>` where `H`
/// is a [`Harness`]; the error says why the host cannot run the tests and is printed. Attributes after it
/// are those of every test.
#[macro_export]
macro_rules! runtime_conformance {
    ($harness:expr $(, $(#[$attribute:meta])+)?) => {
        $crate::runtime_conformance! { @each [$($(#[$attribute])+)?] $harness;
            a_created_container_has_no_process
            a_started_container_has_an_init_that_the_kernel_knows_as_its_own
            a_second_create_of_a_key_is_refused
            starting_what_runs_changes_nothing
            starting_what_does_not_exist_is_refused
            containers_are_found_in_every_state_and_by_a_new_daemon
            a_kill_through_the_pidfd_ends_everything_and_is_told_by_the_exit_code
            the_exit_code_of_the_program_is_told
            a_start_of_a_program_that_does_not_exist_is_refused
            signals_reach_the_program
            removal_leaves_nothing_behind_and_may_be_repeated
            a_live_container_is_not_removed
            a_container_that_never_started_is_removed
            instances_do_not_see_each_other
            a_start_without_an_answer_is_found_by_its_processes
            commands_have_their_outputs_apart_and_their_exit_code
            commands_read_their_standard_input_to_its_end
            commands_run_where_and_with_what_was_asked
            a_command_of_another_user_opens_its_streams_anew
            commands_have_a_terminal_of_the_size_that_was_asked
            commands_are_slowed_by_a_reader_that_does_not_read
            a_command_that_does_not_exist_says_so
            a_command_that_closes_its_terminal_goes_on_to_its_own_end
            a_command_dies_with_its_container
            a_command_is_killed_with_all_that_it_has_started
            a_command_ends_with_its_first_process_and_leaves_the_others
            a_command_ends_with_its_reader
            a_command_needs_a_running_container
            a_program_in_a_terminal_has_its_size_its_name_and_control_over_jobs
            all_who_are_attached_see_the_same_and_who_comes_later_too
            the_end_of_a_program_is_told_to_who_is_attached
            who_does_not_read_a_terminal_slows_nobody_and_catches_up
            who_types_more_than_a_program_reads_waits
            a_program_without_a_terminal_has_none_to_attach_to
            a_kept_command_outlives_who_started_it
            a_kept_command_is_ended_with_all_that_it_has_started
            kept_commands_are_so_many_at_most_and_make_room_when_they_have_ended
            logs_hold_both_outputs_and_their_tail
            a_followed_log_goes_on_until_the_container_ends
            a_followed_log_ends_in_order_when_its_container_is_removed
            log_lines_bear_the_time_when_asked
            only_lo_is_there_and_it_is_up
            names_are_told_by_files_that_cannot_be_changed
            the_environment_has_the_session_and_its_generation
            limits_are_set
            binds_are_mounted_as_asked
        }
    };
    (@each $attributes:tt $harness:expr; $($check:ident)+) => {$(
        $crate::runtime_conformance! { @one $attributes $harness; $check }
    )+};
    (@one [$(#[$attribute:meta])*] $harness:expr; $check:ident) => {
        $(#[$attribute])*
        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $check() {
            match $harness {
                Ok(harness) => $crate::runtime_conformance::$check(
                    &$crate::runtime_conformance::Stage::new(harness),
                )
                .await,
                Err(why) => $crate::runtime_conformance::say_skipped(&why),
            }
        }
    };
}

/// Reports that a test was skipped, and why.
#[expect(clippy::print_stdout, reason = "tests report there what they skip")]
pub fn say_skipped(why: &str) {
    println!("skipped: {why}");
}
