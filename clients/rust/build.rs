//! Generates the stubs of proto/ with the protoc of PROTOC, or one that comes with a crate.

use std::path::{Path, PathBuf};

const FILES: [&str; 3] =
    ["kvasir/common/v1/error_reason.proto", "kvasir/cachestore/v1/cachestore.proto", "kvasir/inference/v1/inference.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-env-changed=PROTOC");
    let mut config = tonic_prost_build::Config::new();
    let mut includes = vec![PathBuf::from("proto")];
    if std::env::var_os("PROTOC").is_none() {
        config.protoc_executable(protoc_bin_vendored::protoc_bin_path()?);
        includes.push(protoc_bin_vendored::include_path()?);
    }
    let files: Vec<PathBuf> = FILES.iter().map(|name| Path::new("proto").join(name)).collect();
    tonic_prost_build::configure().build_server(false).compile_with_config(config, &files, &includes)?;
    Ok(())
}
