use super::*;

fn place(path: &str, numa_node: Option<u32>) -> BusPlace {
    BusPlace { path: path.split('/').filter(|part| !part.is_empty()).map(Into::into).collect(), numa_node }
}

/// Eight GPUs and ten NICs as in a DGX H100: a GPU and its NIC are behind one switch; two NICs for storage hang off the host's bridges.
fn dgx() -> (Vec<BusPlace>, Vec<BusPlace>) {
    let (mut gpus, mut nics) = (Vec::new(), Vec::new());
    for at in 0..8_u32 {
        let (root, node) = (format!("pci0000:{at}0/0000:{at}0:01.0/0000:{at}1:00.0"), Some(at / 4));
        gpus.push(place(&format!("{root}/0000:{at}2:00.0/0000:{at}3:00.0"), node));
        nics.push(place(&format!("{root}/0000:{at}2:02.0/0000:{at}4:00.0"), node));
    }
    (gpus, nics)
}

#[test]
fn distances_are_those_of_nvidia_smi() {
    let (gpus, nics) = dgx();
    assert_eq!(distance(&gpus[0], &nics[0]), Distance::Switch);
    assert_eq!(distance(&gpus[0], &nics[1]), Distance::Node);
    assert_eq!(distance(&gpus[0], &nics[7]), Distance::System);
    let below = |path: &str| place(path, None);
    let gpu = below("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0/0000:03:00.0");
    assert_eq!(distance(&gpu, &below("pci0000:00/0000:00:02.0/0000:09:00.0")), Distance::HostBridge);
    let behind_two = below("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:04:00.0/0000:05:00.0/0000:06:00.0");
    assert_eq!(distance(&gpu, &behind_two), Distance::Switches);
    assert_eq!(distance(&below("pci0000:00/0000:00:01.0"), &below("pci0000:00/0000:00:02.0")), Distance::HostBridge);
    assert_eq!(distance(&BusPlace::default(), &BusPlace::default()), Distance::System, "nobody knows");
}

#[test]
fn each_gpu_of_a_dgx_has_the_nic_behind_its_switch_in_whatever_order_they_are() {
    let (gpus, mut nics) = dgx();
    nics.reverse();
    assert_eq!(nics_of_gpus(&gpus, &nics), (0..8).map(|gpu| vec![7 - gpu]).collect::<Vec<_>>());
    let half = nics_of_gpus(&gpus[..4], &nics);
    assert!(
        half.iter().enumerate().all(|(gpu, own)| own.len() == 2 && own[0] == 7 - gpu),
        "two each, nearest first: {half:?}"
    );
    let mut all: Vec<usize> = half.into_iter().flatten().collect();
    all.sort_unstable();
    assert_eq!(all, (0..8).collect::<Vec<_>>(), "none is left out");
}

#[test]
fn eight_gpus_share_two_nics_by_their_numa_node() {
    let (gpus, _) = dgx();
    let nics = [place("pci0000:f0/0000:f0:01.0", Some(1)), place("pci0000:0f/0000:0f:01.0", Some(0))];
    let own: Vec<usize> = nics_of_gpus(&gpus, &nics).concat();
    assert_eq!(own, [1, 1, 1, 1, 0, 0, 0, 0]);
}

#[test]
fn one_nic_serves_all_and_none_serves_none() {
    let (gpus, nics) = dgx();
    assert_eq!(nics_of_gpus(&gpus, &nics[..1]).concat(), [0; 8]);
    assert_eq!(nics_of_gpus(&gpus, &[]), vec![Vec::<usize>::new(); 8]);
    assert!(nics_of_gpus(&[], &nics).is_empty());
}

#[test]
fn where_nobody_knows_the_bus_gpus_go_round_evenly() {
    let unknown = |count| vec![BusPlace::default(); count];
    assert_eq!(nics_of_gpus(&unknown(4), &unknown(4)).concat(), [0, 1, 2, 3]);
    assert_eq!(nics_of_gpus(&unknown(4), &unknown(2)).concat(), [0, 0, 1, 1]);
    assert_eq!(nics_of_gpus(&unknown(2), &unknown(4)), [[0, 1], [2, 3]]);
    assert_eq!(nics_of_gpus(&unknown(3), &unknown(4)).concat(), [0, 1, 2]);
}

/// The first could have either; the second is near to one alone.
#[test]
fn nobody_takes_what_another_needs_more() {
    let switch = "pci0000:00/0000:00:01.0/0000:01:00.0";
    let near = |device: &str| place(&format!("{switch}/{device}/{device}d"), Some(0));
    let gpus = [near("a"), near("b")];
    let nics = [near("c"), place("pci0000:80/0000:80:01.0", Some(1)), near("d")];
    let own = nics_of_gpus(&gpus, &nics).concat();
    assert_eq!(own, [0, 2]);
    // Against all assignments, with distances drawn.
    let mut state = 7_u64;
    for _ in 0..200 {
        let mut draw = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let mut places = |count: u64| -> Vec<BusPlace> {
            let path = |bridge: u64, port: u64, at: u64| format!("pci{bridge}/{port}/s{port}/p{at}/d{at}");
            (0..count).map(|at| place(&path(draw(3), draw(2), at), Some(draw(2) as u32))).collect()
        };
        let (gpus, nics) = (places(3), places(4));
        let sum =
            |own: &[usize]| -> u32 { own.iter().zip(&gpus).map(|(nic, gpu)| distance(gpu, &nics[*nic]) as u32).sum() };
        let all = (0..64).map(|code: usize| [code % 4, code / 4 % 4, code / 16]);
        let distinct = all.filter(|own| own[0] != own[1] && own[1] != own[2] && own[0] != own[2]);
        let least = distinct.map(|own| sum(&own)).min().expect("some");
        assert_eq!(sum(&nics_of_gpus(&gpus, &nics).concat()), least);
    }
}
