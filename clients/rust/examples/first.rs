//! The first example of README.md: an agent is told something, and remembers it.

use kvasir_client::{Client, Turn, user};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let home = std::env::var("HOME")?;
    let engine = Client::connect(format!("unix:{home}/.kvasir/run/engine.sock")).await?; // what `kvasir up` listens on
    let turn = Turn::append([user("My name is Anna. What is my name?")]).agent("ada");
    let reply = engine.reply(turn).await?;
    println!("{} {}", reply.text(), reply.cached_tokens());
    Ok(())
}
