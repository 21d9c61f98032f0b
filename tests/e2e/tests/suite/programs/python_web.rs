//! Streamlit's page, and aiohttp as a server and as a client by the session's egress.

use conman_e2e::{chromium, eventually};
use http::StatusCode;

use super::{CLI_PATIENCE, Programs};
use crate::egress::{HOST, web_server};

/// It takes itself for a developer's copy where its directory is not called site-packages.
const STREAMLIT: &str = r#"
port = 8501
env = { HOME = "/tmp", PYTHONPATH = "/opt/web" }
command = ["sh", "-c", """
[ -e /work/app.py ] || cat >/work/app.py <<END
import streamlit
if streamlit.button("compute"):
    streamlit.write(f"the answer is {6 * 7}")
END
exec python3 -m streamlit run /work/app.py --server.address 127.0.0.1 --server.port 8501 --server.headless true \
    --browser.gatherUsageStats false --global.developmentMode false
"""]
"#;

const AIOHTTP: &str = r#"
port = 8080
env = { PYTHONPATH = "/opt/web" }
command = ["python3", "-c", """
import aiohttp
from aiohttp import web

async def fetch(request):
    by_proxy = 'proxy' in request.query
    async with aiohttp.ClientSession(trust_env=by_proxy) as client:
        try:
            async with client.get(request.query['url']) as answer:
                return web.Response(text=await answer.text())
        except aiohttp.ClientError as error:
            return web.Response(text=repr(error), status=502)

app = web.Application()
app.router.add_get('/', fetch)
web.run_app(app, host='127.0.0.1', port=8080)
"""]
"#;

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn streamlit_computes_for_a_browser_also_after_a_preemption() {
    let Some(programs) = Programs::start("python-web", &[("app", STREAMLIT)]).await else {
        return;
    };
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    let port = programs.conman.sessions_address().port();
    for _ in 0..2 {
        browser.open(&format!("http://app.localhost:{port}/")).await;
        let press = "const button = document.querySelector('[data-testid=stButton] button'); button?.click(); \
                     return document.body.innerText.includes('the answer is 42')";
        eventually("the answer", CLI_PATIENCE, async || {
            browser.evaluate(press).await == true
        })
        .await;
        programs.preempt().await;
    }
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn aiohttp_serves_and_fetches_by_the_proxy_of_its_session() {
    let web = web_server().await;
    let template = format!("egress = [\"{HOST}:{web}\"]\n{AIOHTTP}");
    let Some(programs) = Programs::start("python-web", &[("aio", &template)]).await else {
        return;
    };
    let sessions = programs.conman.sessions();
    let fetch = async |query: &str| {
        let path = format!("/s/aio/?{query}&url=http://{HOST}:{web}/");
        sessions.get(&path).await
    };
    let fetched = fetch("proxy=1").await;
    assert_eq!(
        (fetched.status, fetched.text().as_str()),
        (StatusCode::OK, "hello")
    );
    // By itself it does not look at the variables of the session.
    let direct = fetch("direct=1").await;
    assert_eq!(direct.status, StatusCode::BAD_GATEWAY, "{}", direct.text());
    assert!(direct.text().contains("Connect"), "{}", direct.text());
}
