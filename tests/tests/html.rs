//! The HTML page of the gate, from the command line to a browser: what it shows of devices right and faulty, and that a
//! real browser draws it, on a phone, on a desk and in the dark. The browser is Chromium, run without a screen; where
//! there is none (`ASSAY_CHROMIUM`, `chromium`, `chromium-browser`, `google-chrome`) its test says so and ends.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use assay_tests::{Bench, assay, written};
use reference::TensorId;
use reference::inputs::cache_row;

/// Runs the gate on bundles; the exit code and the page.
fn gate(bundles: &[&Path], page: &Path) -> (i32, String) {
    let run = Command::new(assay())
        .arg("gate")
        .args(bundles)
        .args(["--format", "json", "--html"])
        .arg(page)
        .env_remove("GITHUB_STEP_SUMMARY")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let code = run.status.code().unwrap();
    // What is drawn is no part of the JSON.
    let json = String::from_utf8_lossy(&run.stdout);
    assert!(json.contains("\"tensors\"") && !json.contains("\"map\""), "{json}");
    (code, fs::read_to_string(page).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&run.stderr))))
}

/// A bundle whose attention is wrong in one head of one row, and whose later steps follow from it.
fn faulty(folder: &Path) -> PathBuf {
    let bench = Bench::recorded("mini/active2");
    let dim = bench.layer().geometry.head_dim;
    let mut device = bench.device();
    device.map(TensorId::AttnOut, |row, column, x| if row == 1 && column / dim == 3 { x * 2.0 } else { x });
    device.follow();
    let captures = device.captures();
    let bundle = folder.join("faulty");
    Bench { case: bench.case.clone(), inputs: bench.inputs.clone(), captures }.write(&bundle);
    bundle
}

/// The text between two marks, the first after `from`.
fn between<'a>(page: &'a str, from: &str, to: &str) -> &'a str {
    let (_, rest) = page.split_once(from).unwrap_or_else(|| panic!("no {from:?} in the page"));
    rest.split_once(to).unwrap_or_else(|| panic!("no {to:?} behind {from:?}")).0
}

#[test]
fn the_page_shows_where_a_fault_is() {
    let folder = tempfile::tempdir().unwrap();
    let (code, page) = gate(&[&faulty(folder.path())], &folder.path().join("r.html"));
    assert_eq!(code, 1);
    let stages = between(&page, "<ol class=\"stages\">", "</ol>");
    assert_eq!(stages.matches("<li").count(), 24);
    assert_eq!(stages.matches("first divergence</span>").count(), 1);
    assert!(between(stages, " attention</a>", "</li>").contains("first divergence"));
    // The tensor's maps: by column, and by head, where row 1 alone drifts.
    let attn = between(&page, "<strong>attn_out</strong>", "</details>");
    let heads = between(attn, "batch row by head", "</figure>");
    assert!(heads.contains("drift in batch row 1<"), "{heads}");
    assert_eq!(heads.matches("class=\"d\"").count(), 1, "one head of one row");
    assert!(attn.contains("row by column") && attn.contains("distance in ULPs"));
    // Cache tensors have their pages.
    assert!(between(&page, "<strong>k_written_values</strong>", "</details>").contains("contract's bits"));
    assert!(page.len() < 1_000_000, "{} bytes", page.len());
}

#[test]
fn pages_of_the_cache_are_shown_where_a_cache_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::recorded("mini/active2");
    let mut device = bench.device();
    device.nudge(TensorId::KRows, |row, column| u32::from(row == 1 && column == 5));
    let bundle = folder.path().join("faulty");
    Bench { case: bench.case.clone(), inputs: bench.inputs.clone(), captures: device.captures() }.write(&bundle);
    let (code, page) = gate(&[&bundle], &folder.path().join("r.html"));
    assert_eq!(code, 1);
    let keys = between(&page, "<strong>k_written_values</strong>", "</details>");
    let pages = between(keys, "page by slot of the page", "</figure>");
    let slot = bench.layer().batch.slots[1];
    assert!(pages.contains(&format!("drift in page {}<", slot / reference::PAGE)), "{pages}");
    assert_eq!(pages.matches("class=\"d\"").count(), 1);
}

#[test]
fn a_write_beside_the_slots_is_shown_on_its_page() {
    let folder = tempfile::tempdir().unwrap();
    let bench = Bench::recorded("mini/active2");
    let layer = bench.layer();
    let page_of = |slot: usize| slot / reference::PAGE;
    let stray = (0..).find(|page| !layer.batch.slots.iter().any(|&slot| page_of(slot) == *page)).unwrap();
    let mut captures = bench.captures.clone();
    written::edit(&mut captures.v_written, layer.geometry, |rows| {
        let row = cache_row(layer.geometry, stray * reference::PAGE + 7, 0);
        let values = rows.values().next().unwrap().clone();
        rows.insert(row as i64, values);
    });
    let bundle = folder.path().join("faulty");
    Bench { case: bench.case.clone(), inputs: bench.inputs.clone(), captures }.write(&bundle);
    let (code, page) = gate(&[&bundle], &folder.path().join("r.html"));
    assert_eq!(code, 1);
    let values = between(&page, "<strong>v_written_values</strong>", "</details>");
    let pages = between(values, "page by slot of the page", "</figure>");
    assert!(pages.contains(&format!("drift in page {stray}<")), "{pages}");
}

/// Measures the page: its width, what sticks out of it, its colours, and errors.
const PROBE: &str = r#"<script>
window.failures = [];
window.addEventListener("error", event => window.failures.push(event.message));
window.addEventListener("load", () => {
  document.querySelectorAll("details").forEach(details => details.open = true);
  const width = document.documentElement.clientWidth;
  const out = [...document.querySelectorAll("body *")].filter(element => {
    const box = element.getBoundingClientRect();
    const own = element.parentElement.closest(".scroll");
    return !own && box.width > 1 && (box.right > width + 1 || box.left < -1);
  }).map(element => element.tagName + "." + element.getAttribute("class"));
  const stages = [...document.querySelectorAll(".stages li")];
  const clipped = stages.filter(element => element.scrollWidth > element.clientWidth);
  const said = ["inner " + window.innerWidth, "scroll " + document.documentElement.scrollWidth,
    "out " + out.join(" "), "clipped " + clipped.length, "failures " + window.failures.join(" "),
    "back " + getComputedStyle(document.body).backgroundColor, "maps " + document.querySelectorAll("svg.map").length,
    "flat " + [...document.querySelectorAll("svg.map")].filter(map => map.getBoundingClientRect().height < 10).length,
    ""].join("\n");
  parent.postMessage(said, "*");
});
</script></body>"#;

/// A frame as wide as a screen, because a browser's window does not get as narrow as a phone; it shows what the
/// measured page in it says.
fn frame(width: usize) -> String {
    format!(
        r#"<!DOCTYPE html><meta name="color-scheme" content="light dark"><body><script>
addEventListener("message", event => {{
  const probe = document.createElement("pre");
  probe.id = "probe";
  probe.textContent = event.data;
  document.body.append(probe);
}});
</script><iframe src="measured.html" style="border:0;width:{width}px;height:800px"></iframe></body>"#
    )
}

/// The browser, where there is one.
fn chromium() -> Option<OsString> {
    let named = std::env::var_os("ASSAY_CHROMIUM").filter(|name| !name.is_empty());
    let names = ["chromium", "chromium-browser", "google-chrome"].map(OsString::from);
    let runs = |name: &OsString| {
        let version = Command::new(name).arg("--version").stdin(Stdio::null()).output();
        version.is_ok_and(|output| output.status.success())
    };
    let named_fails = named.as_ref().is_some_and(|name| !runs(name));
    assert!(!named_fails, "ASSAY_CHROMIUM: {named:?} does not run");
    named.into_iter().chain(names).find(runs)
}

/// What a browser makes of a page: what it prints, and what it complains about.
fn browse(browser: &OsString, page: &Path, flags: &[&str]) -> (String, String) {
    let profile = tempfile::tempdir().unwrap();
    let mut data = OsString::from("--user-data-dir=");
    data.push(profile.path());
    let run = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"])
        .args(["--disable-dev-shm-usage", "--no-first-run"])
        .arg(data)
        .args(flags)
        .arg(format!("file://{}", page.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    let console = said.lines().filter(|line| line.contains("CONSOLE")).collect::<Vec<_>>().join("\n");
    (String::from_utf8_lossy(&run.stdout).into_owned(), console)
}

#[test]
fn a_browser_draws_the_page() {
    let Some(browser) = chromium() else {
        println!("skipped: no Chromium found (ASSAY_CHROMIUM, chromium, chromium-browser, google-chrome)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("r.html");
    let tokens = Bench::path("mini/tokens1");
    let (code, text) = gate(&[&faulty(folder.path()), &tokens], &page);
    assert_eq!(code, 1);
    // The page itself, under its own rules: it draws, and nothing is refused or missing.
    let shot = folder.path().join("shot.png");
    let to = format!("--screenshot={}", shot.display());
    let (_, console) = browse(&browser, &page, &["--window-size=1280,900", &to]);
    assert_eq!(console, "");
    assert!(fs::metadata(&shot).unwrap().len() > 10_000, "the browser drew nothing");
    // A copy that measures itself, which the page's rules would not let it do.
    let rules = between(&text, "<meta http-equiv=\"Content-Security-Policy\"", ">");
    let free = text.replace(&format!("<meta http-equiv=\"Content-Security-Policy\"{rules}>"), "");
    let copy = folder.path().join("measured.html");
    fs::write(&copy, free.replace("</body>", PROBE)).unwrap();
    let mut backgrounds = Vec::new();
    let framed = folder.path().join("framed.html");
    for (width, scheme) in [(360, "1"), (1280, "1"), (360, "0")] {
        fs::write(&framed, frame(width)).unwrap();
        let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
        let flags = ["--window-size=1300,900", &scheme, "--virtual-time-budget=20000", "--dump-dom"];
        let (dom, console) = browse(&browser, &framed, &flags);
        assert_eq!(console, "");
        let measured = between(&dom, "<pre id=\"probe\">", "</pre>");
        let value = |name: &str| {
            let line = measured.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {measured}")).trim().to_owned()
        };
        assert_eq!(value("inner"), width.to_string());
        assert_eq!(value("scroll"), width.to_string(), "{measured}");
        assert_eq!((value("out"), value("failures")), (String::new(), String::new()), "{measured}");
        assert_eq!((value("clipped"), value("flat")), ("0".to_owned(), "0".to_owned()), "{measured}");
        assert!(value("maps").parse::<usize>().unwrap() > 10, "{measured}");
        backgrounds.push(value("back"));
    }
    assert_eq!(backgrounds[0], backgrounds[1]);
    assert_ne!(backgrounds[0], backgrounds[2], "the dark has colours of its own");
}
