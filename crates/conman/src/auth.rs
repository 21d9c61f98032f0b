//! `conman auth`: makes tokens locally, without the daemon.

use std::process::ExitCode;

use conman_auth::Scope;
use conman_cli::{AuthArgs, AuthCommand, NewTokenArgs, TokenScope};

pub(crate) fn run(arguments: &AuthArgs, json: bool) -> ExitCode {
    match &arguments.command {
        AuthCommand::NewToken(arguments) => new_token(arguments, json),
    }
}

fn new_token(arguments: &NewTokenArgs, json: bool) -> ExitCode {
    let scope = match arguments.scope {
        TokenScope::Admin => Scope::Admin,
        TokenScope::Frontend => Scope::Frontend,
        TokenScope::Read => Scope::Read,
    };
    let made = match conman_auth::generate(scope) {
        Ok(made) => made,
        Err(error) => return crate::fail(&format!("cannot make a token: {error}")),
    };
    let name = toml::Value::String(arguments.name.clone());
    let entry = format!(
        "[[token]]\nname = {name}\nscope = \"{}\"\nsha256 = \"{}\"",
        arguments.scope.as_str(),
        made.sha256
    );
    if json {
        let value = serde_json::json!({
            "token": made.text, "name": arguments.name, "scope": arguments.scope.as_str(),
            "sha256": made.sha256, "entry": entry,
        });
        crate::tell(&value.to_string());
    } else {
        crate::tell(&format!(
            "token (shown only now): {}\n\nappend this to the file that `auth.tokens_file` names \
             (mode 0600), then send\nthe daemon a SIGHUP:\n\n{entry}",
            made.text
        ));
    }
    ExitCode::SUCCESS
}
