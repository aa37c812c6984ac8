//! Compiles the GPU kernels with nvcc: options and GPU architectures (`sm_80`, `sm_90`, `sm_100`).
//! Without an nvcc the crate builds all the same, and `mccs_kernels::cuda::IMAGE` is `None`.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Machine code for these, and portable code of the last for GPUs that come later.
const ARCHITECTURES: [u32; 3] = [80, 90, 100];
/// Sources, by the variable that is to hold the image.
const SOURCES: [(&str, &str); 3] = [("mccs", "COMPILED"), ("puts", "PUTS_COMPILED"), ("stage", "STAGE_COMPILED")];
/// Folder of headers for programs' own kernels.
const PROGRAMS_HEADERS: &str = "../shim/include";
/// Source that is compiled with these, and without the others.
const PROGRAMS_KERNELS: &str = "cuda/puts.cu";
const PROGRAMS_HEADER: &str = "../shim/include/mccs/device.cuh";
/// Variables that name a compiler, in the order of preference.
const VARIABLES: [&str; 4] = ["MCCS_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH"];

fn main() -> ExitCode {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=cuda");
    println!("cargo:rerun-if-changed={PROGRAMS_HEADER}");
    // Not PATH: it changes for reasons of its own, and a compilation takes a minute or two.
    VARIABLES.iter().filter(|name| **name != "PATH").for_each(|name| println!("cargo:rerun-if-env-changed={name}"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let nvcc = nvcc();
    if nvcc.is_none() {
        println!(
            "cargo:warning=no nvcc that will do (looked at {}, and the packages of python3): built without GPU kernels",
            VARIABLES.join(", ")
        );
    }
    for (name, variable) in SOURCES {
        let fatbin = out.join(format!("{name}.fatbin"));
        let image = match &nvcc {
            Some(nvcc) => {
                if let Err(error) = compile(nvcc, &format!("cuda/{name}.cu"), &fatbin) {
                    println!("cargo:warning={} cannot compile the GPU kernels: {error}", nvcc.display());
                    return ExitCode::FAILURE;
                }
                format!("Some(&Aligned(*include_bytes!({:?})))", fatbin.display().to_string())
            }
            None => "None".into(),
        };
        let source = format!("static {variable}: Option<&'static Aligned<[u8]>> = {image};\n");
        if let Err(error) = fs::write(out.join(format!("{name}.rs")), source) {
            println!("cargo:warning=cannot write to OUT_DIR: {error}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

fn nvcc() -> Option<PathBuf> {
    if let Some(named) = env::var_os("MCCS_NVCC") {
        // Named: used as it is, so that a wrong name is an error and not a build without kernels.
        return (!named.is_empty()).then(|| PathBuf::from(named));
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(env::var_os).map(|home| Path::new(&home).join("bin"));
    let paths = env::var_os("PATH").map(|path| env::split_paths(&path).collect::<Vec<_>>()).unwrap_or_default();
    let found =
        homes.chain(paths).chain(python_packages()).map(|folder| folder.join("nvcc")).filter(|nvcc| nvcc.is_file());
    found.into_iter().find(|nvcc| {
        let lacks = lacks(nvcc);
        if let Some(lacks) = &lacks {
            let path = nvcc.display();
            println!("cargo:warning={path} is passed over: it lacks {lacks}, and CUDA 12.8 or newer is needed (MCCS_NVCC names another)");
        }
        lacks.is_none()
    })
}

/// A needed ability that a compiler lacks. One that just lies about is not to break the build where none at all would not.
fn lacks(nvcc: &Path) -> Option<String> {
    let says = |argument: &str| {
        let output = Command::new(nvcc).arg(argument).output();
        output.map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let codes = says("--list-gpu-code");
    let is_known = |code: &String| codes.lines().any(|line| line.trim() == code);
    let architecture = ARCHITECTURES.map(|it| format!("sm_{it}")).into_iter().find(|code| !is_known(code));
    let compresses = || says("--help").contains("--compress-mode");
    architecture.or_else(|| (!compresses()).then(|| "--compress-mode".into()))
}

/// Folder in which the compiler's Python packages put it, if the python3 on the path has them.
fn python_packages() -> Option<PathBuf> {
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new("python3").args(["-c", script]).output().ok().filter(|output| output.status.success())?;
    let folder = String::from_utf8(output.stdout).ok()?;
    Some(Path::new(folder.trim()).join("nvidia/cu13/bin"))
}

/// Compiles, or takes what another profile or set of features has compiled from the same: it takes minutes.
fn compile(nvcc: &Path, source: &str, image: &Path) -> Result<(), String> {
    // No contraction of multiply and add: the reference rounds both. Compressed: a tenth of the size, for some milliseconds when it is loaded.
    let mut arguments: Vec<String> =
        ["-std=c++17", "-O3", "-fmad=false", "-fatbin", "-Werror", "all-warnings", "--compress-mode=size", source]
            .map(String::from)
            .to_vec();
    if source == PROGRAMS_KERNELS {
        arguments.extend(["-I".into(), PROGRAMS_HEADERS.into()]);
    }
    let [.., newest] = ARCHITECTURES;
    let codes = ARCHITECTURES.map(|it| format!("arch=compute_{it},code=sm_{it}"));
    for code in codes.into_iter().chain([format!("arch=compute_{newest},code=compute_{newest}")]) {
        arguments.extend(["-gencode".into(), code]);
    }
    let kept = kept(nvcc, source, &arguments).map_err(|error| error.to_string())?;
    if fs::copy(&kept, image).is_ok() {
        return Ok(());
    }
    let threads = env::var("NUM_JOBS").unwrap_or_else(|_| "1".into());
    let output = Command::new(nvcc).args(&arguments).args(["--threads", &threads, "-o"]).arg(image).output();
    let output = output.map_err(|error| error.to_string())?;
    if output.status.success() {
        // Moved there, so that nobody sees half of it.
        let part = kept.with_extension(std::process::id().to_string());
        return fs::copy(image, &part).and_then(|_| fs::rename(&part, &kept)).map_err(|error| error.to_string());
    }
    let lines = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    Err(lines.trim().replace('\n', "; "))
}

/// Path, in the target folder, of the image of these sources by this compiler with these arguments.
fn kept(nvcc: &Path, source: &str, arguments: &[String]) -> io::Result<PathBuf> {
    let mut key = DefaultHasher::new();
    (Command::new(nvcc).arg("--version").output()?.stdout, arguments).hash(&mut key);
    let mut files = vec![PathBuf::from(source)];
    if source == PROGRAMS_KERNELS {
        files.push(PROGRAMS_HEADER.into());
    } else {
        files.extend(fs::read_dir("cuda/include")?.map(|file| Ok(file?.path())).collect::<io::Result<Vec<_>>>()?);
    }
    files.sort();
    for file in files {
        (&file, fs::read(&file)?).hash(&mut key);
    }
    // target/PROFILE/build/mccs-kernels-.../out
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let folder = out.ancestors().nth(4).unwrap_or(&out).join("gpu-images");
    fs::create_dir_all(&folder)?;
    let name = Path::new(source).file_stem().unwrap_or_default().display();
    Ok(folder.join(format!("{name}-{:016x}.fatbin", key.finish())))
}
