//! Rails whose data NICs read and write in memory of GPUs: on emulated NICs (`tests/nics`), whose copy engines are the GPUs'.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use mccs::CollectiveKind;
use mccs_config::change::StrategyChange;
use mccs_config::service::TransportKind;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{copy_from_host, copy_to_host};
use mccs_emulated_nics::control::{Carried, Fault, carried, make};
use mccs_eval::workload::Call;
use mccs_registry::CommInfo;
use mccs_tenants::Resource;
use mccs_tests::hosts::TestHosts;
use mccs_tests::nics::{library_in, list_nics};

use super::rails::{both_play, every_kind, everything, four_processes, play_in_teams, synchronize, teams};
use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody};
use super::until_it_fails::{all_are_told, are_at_work, others_hear_of_a_kill};
use super::wait_until;

/// Roles of processes of these tests, besides those of others.
pub const ROLES: &[(&str, Role)] =
    &[("says_how_rails_move", says_how_rails_move), ("combines_until_all_are_told", combines_until_all_are_told)];

/// A file that rank 0 looks for.
const ENDS: &str = "MCCS_GPU_ENDS";

/// NICs of a host, of which GPUs have one each in turn.
pub const NICS: usize = 2;

/// Hosts with emulated NICs of their own.
pub struct Fixture {
    pub hosts: TestHosts,
    folder: tempfile::TempDir,
}

impl Fixture {
    /// So many, with lines of `[cuda]` for each. `before` is done to the NICs first.
    pub fn new(count: usize, cuda: impl Fn(usize) -> String, before: impl Fn(&Path)) -> Self {
        let text = |host, text: String| text.replacen("[cuda]\n", &format!("[cuda]\n{}", cuda(host)), 1);
        Self::made(count, text, before)
    }

    /// So many, with settings that each makes of what all have.
    pub fn with(count: usize, text: impl Fn(usize, String) -> String) -> Self {
        Self::made(count, text, |_| ())
    }

    fn made(count: usize, text: impl Fn(usize, String) -> String, before: impl Fn(&Path)) -> Self {
        // Memory, not a disk.
        let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
        list_nics(folder.path(), &vec![NICS; count], 1, 100_000);
        before(folder.path());
        let library = library_in(folder.path());
        let hosts = TestHosts::start_each(count, |host| {
            let names: Vec<_> = (host * NICS..(host + 1) * NICS).map(|number| format!("n{number}")).collect();
            let rdma = format!("[rdma]\nuse = \"auto\"\nlibrary = {library:?}\ndevices = {names:?}\n");
            text(host, everything()) + &rdma
        });
        Fixture { hosts, folder }
    }

    /// Waits until nobody holds memory of GPUs any more.
    pub fn waits_for_memory(&self, hosts: usize) {
        for host in 0..hosts {
            let tenants = self.hosts.service(host).service().registry.tenants();
            wait_until(|| tenants.iter().all(|tenant| tenant.used(Resource::GpuMemoryBytes) == 0));
        }
    }

    /// Bytes of each NIC of a host.
    pub fn carried(&self, host: usize) -> [Carried; NICS] {
        let numbers: [usize; NICS] = std::array::from_fn(|nic| host * NICS + nic);
        numbers.map(|nic| carried(self.folder.path(), &format!("h{host}"), &format!("n{nic}")).expect("a NIC"))
    }

    /// How GPUs of a host send, and why not in a better way.
    fn shown(&self, host: usize) -> Vec<(Option<String>, String)> {
        let gpus = self.hosts.service(host).service().registry.gpus();
        let view = |gpu| {
            let view = mccs_control::GpuView::of(gpu);
            (view.nic_access, view.nic_access_reason.unwrap_or_default())
        };
        gpus.iter().map(view).collect()
    }
}

/// Has NICs refuse memory of GPUs.
pub fn refuse(folder: &Path, nics: &[usize], faults: &[Fault]) {
    for (nic, fault) in nics.iter().flat_map(|nic| faults.iter().map(move |fault| (nic, fault))) {
        make(folder, &format!("h{}", nic / NICS), &format!("n{nic}"), *fault).expect("a NIC");
    }
}

pub const NOTHING: [Fault; 2] = [Fault::DmaBuf(false), Fault::PeerMemory(false)];

/// Text for a rank on how its rails move.
fn says_how_rails_move(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { comm, together, .. }| {
        ensure!(comm.rails_from().is_some());
        println!("rank {} sends {}", comm.rank(), if comm.uses_gpudirect() { "directly" } else { "by the host" });
        together.wait();
        Ok(())
    })
}

/// Rounds of calls, each checked, until rank 0 finds a file: of which all hear by a call of their own.
fn combines_until_all_are_told(place: &Place) -> anyhow::Result<()> {
    let ends = PathBuf::from(std::env::var_os(ENDS).context("a file")?);
    place.each_rank(|Rank { context, comm, stream, .. }| {
        ensure!(comm.uses_gpudirect());
        let flag = Call { kind: CollectiveKind::Broadcast, root: 0, ..call(0, place.nranks, 1) };
        let told = Buffers::of(&context, &flag)?;
        let shapes = (0..16).map(|n| every_kind(n, place.nranks, [50_001, 300_003][n as usize / 8]));
        let shapes: Vec<_> = shapes.collect();
        // Made once: what is freed waits for all streams of the process, which wait for others' next calls.
        let at = shapes.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        for seed in (0..).step_by(1000) {
            let calls: Vec<_> = shapes.iter().map(|call| Call { seed: call.seed + seed, ..*call }).collect();
            calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
            calls.iter().zip(&at).try_for_each(|(call, at)| enqueue(&comm, call, at, stream.raw()))?;
            synchronize(&stream)?;
            ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
            calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
            let is_over = f32::from(u8::from(comm.rank() == 0 && ends.exists()));
            // SAFETY: both have room for the only element, and nothing is in flight.
            unsafe { copy_from_host(told.send.address(), &is_over.to_ne_bytes())? };
            enqueue(&comm, &flag, &told, stream.raw())?;
            synchronize(&stream)?;
            let mut is_over = [0; 4];
            // SAFETY: as above.
            unsafe { copy_to_host(&mut is_over, told.recv.address())? };
            if comm.rank() == 0 && seed == 1000 {
                println!("runs");
            }
            if f32::from_ne_bytes(is_over) != 0.0 {
                return Ok(());
            }
        }
        Ok(())
    })
}

/// The ranks of each host that send from memory of their GPUs.
fn direct_ranks(fixture: &Fixture, teams: &[u32]) -> Vec<usize> {
    let said = play_in_teams("says_how_rails_move", &fixture.hosts, teams);
    said.iter().map(|said| said.matches("sends directly").count()).collect()
}

#[test]
#[ignore = "needs a GPU"]
fn rails_move_memory_of_gpus() {
    for teams in teams() {
        let fixture = Fixture::new(teams.len(), |_| String::new(), |_| ());
        for host in 0..teams.len() {
            assert!(fixture.shown(host).iter().all(|(way, _)| way.as_deref() == Some("dma-buf")));
        }
        let all: Vec<_> = teams.iter().map(|team| *team as usize).collect();
        assert_eq!(direct_ranks(&fixture, &teams), all);
        play_in_teams("combines_long", &fixture.hosts, &teams);
        play_in_teams("combines_in_place", &fixture.hosts, &teams);
    }
}

/// Data that hosts pass on round a ring goes from GPU to GPU as well.
#[test]
#[ignore = "needs a GPU"]
fn rings_of_reductions_move_memory_of_gpus() {
    let fixture = Fixture::with(3, |_, text| format!("[strategy]\nreductions = \"ring\"\n{text}"));
    let most = mccs_cuda::gpus().expect("GPUs").len().min(2);
    let teams = [most, 1, most].map(|ranks| ranks as u32);
    assert_eq!(direct_ranks(&fixture, &teams), [most, 1, most]);
    play_in_teams("combines_long", &fixture.hosts, &teams);
    play_in_teams("combines_in_place", &fixture.hosts, &teams);
}

#[test]
#[ignore = "needs a GPU"]
fn where_nics_refuse_memory_of_gpus_it_goes_another_way() {
    let teams = &teams()[0];
    let by =
        |faults: &[Fault], nics: &[usize]| Fixture::new(2, |_| String::new(), |folder| refuse(folder, nics, faults));
    // By address where the dma-buf is refused by one NIC of two.
    let fixture = by(&NOTHING[..1], &[1]);
    let (way, reason) = fixture.shown(0).remove(0);
    assert!(way.as_deref() == Some("peer memory") && reason.contains("dma-buf"), "{way:?} {reason}");
    assert_eq!(direct_ranks(&fixture, teams), [teams[0] as usize, teams[1] as usize]);
    both_play("combines", &fixture.hosts, teams);
    // Through the host where one NIC of two takes nothing: the other host goes on as it is.
    let fixture = by(&NOTHING, &[1]);
    let (way, reason) = fixture.shown(0).remove(0);
    assert!(
        way.as_deref() == Some("bounce") && reason.contains("n1") && reason.contains("dma-buf"),
        "{way:?} {reason}"
    );
    assert!(fixture.shown(1).iter().all(|(way, _)| way.as_deref() == Some("dma-buf")));
    assert_eq!(direct_ranks(&fixture, teams), [0, teams[1] as usize]);
    both_play("combines", &fixture.hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn an_operator_has_all_go_through_the_host() {
    let teams = &teams()[0];
    let off = |host| if host == 1 { "gpudirect = \"off\"\n".to_owned() } else { String::new() };
    let fixture = Fixture::new(2, off, |_| ());
    let (way, reason) = fixture.shown(1).remove(0);
    assert!(way.as_deref() == Some("bounce") && reason.contains("cuda.gpudirect"), "{way:?} {reason}");
    assert_eq!(direct_ranks(&fixture, teams), [teams[0] as usize, 0]);
    play_in_teams("combines_late", &fixture.hosts, teams);
}

/// The tenant's quota does for all but the twins.
#[test]
#[ignore = "needs a GPU"]
fn who_has_no_quota_for_it_goes_through_the_host() {
    let fixture = Fixture::with(2, |host, text| match host {
        0 => text.replacen("name = \"a\"\n", "name = \"a\"\nmax_gpu_memory = \"31MiB\"\n", 1),
        _ => text,
    });
    assert_eq!(direct_ranks(&fixture, &[1, 1]), [0, 1]);
    play_in_teams("combines", &fixture.hosts, &[1, 1]);
    fixture.waits_for_memory(2);
}

/// Operations that were called before the change are in memory of GPUs, which the new transport does not reach.
#[test]
#[ignore = "needs a GPU"]
fn flows_change_to_tcp_and_back_under_load() {
    let teams = &teams()[0];
    let fixture = Fixture::new(2, |_| String::new(), |_| ());
    let ends = fixture.folder.path().join("ends");
    let whole = Place { nranks: teams.iter().sum(), root: "h0".into(), ..everybody(fixture.hosts.service(0), 0) };
    let place = |host: u32| Place {
        ranks: host * teams[0]..(host + 1) * teams[0],
        socket: fixture.hosts.service(host as usize).socket(0),
        ..whole.clone()
    };
    let play = |host| Player::start_with("combines_until_all_are_told", &place(host), &[(ENDS, ends.clone())]);
    let mut players = [0, 1].map(play);
    players[0].hears("runs");
    let service = fixture.hosts.service(0);
    let comms = service.service().registry.comms();
    let is_rail = |comm: &&Arc<CommInfo>| comm.part.is_some() && comm.hosts.len() == 2;
    let rails: Vec<_> = comms.iter().filter(is_rail).cloned().collect();
    assert_eq!(rails.len(), teams[0] as usize);
    for transport in [TransportKind::Tcp, TransportKind::Rdma, TransportKind::Tcp, TransportKind::Rdma] {
        for rail in &rails {
            let change = StrategyChange { transport: Some(transport), ..StrategyChange::default() };
            let request = ControlRequest::Reconfigure { communicator: rail.number, change, window: None };
            loop {
                match ask(&service.control_socket(), &request).expect("an answer") {
                    ControlAnswer::Reconfigured { .. } => break,
                    ControlAnswer::Refused(reason) if reason.contains("try again") => std::thread::yield_now(),
                    other => panic!("{other:?}"),
                }
            }
            let before = rail.totals().operations;
            wait_until(|| rail.totals().operations > before + 40);
        }
    }
    std::fs::write(&ends, "").expect("a sign");
    players.into_iter().for_each(|player| drop(player.ends_well()));
    // A team has memory as long as somebody looks at it.
    drop((rails, comms));
    fixture.waits_for_memory(2);
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_a_rank_that_is_killed_while_nics_move_its_memory() {
    let fixture = Fixture::new(2, |_| String::new(), |_| ());
    others_hear_of_a_kill(four_processes(&fixture.hosts, &[]));
    fixture.waits_for_memory(2);
}

/// A service that stops in the middle of a slice, as one that is killed does to its tenants: streams go on, and everybody is told.
#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_a_service_that_goes_while_nics_move_memory() {
    let mut fixture = Fixture::new(2, |_| String::new(), |_| ());
    let mut players = four_processes(&fixture.hosts, &[]);
    are_at_work(&mut players);
    fixture.hosts.stop(1);
    all_are_told(players, "");
    fixture.waits_for_memory(1);
}
