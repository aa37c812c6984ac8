//! The page: files that are built into the program, so that it needs nothing from elsewhere.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// A file of the page.
pub struct File {
    /// Its content.
    pub text: &'static str,
    /// Its media type.
    pub kind: &'static str,
}

macro_rules! files {
    ($($name:literal is $kind:ident),* $(,)?) => {
        [$(($name, File { text: include_str!(concat!("../page/", $name)), kind: $kind })),*]
    };
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const ICON: &str = "image/svg+xml";

static FILES: [(&str, File); 18] = files![
    "index.html" is HTML,
    "style.css" is CSS,
    "icon.svg" is ICON,
    "app.js" is SCRIPT,
    "act_view.js" is SCRIPT,
    "acts.js" is SCRIPT,
    "api.js" is SCRIPT,
    "communicator.js" is SCRIPT,
    "confirm.js" is SCRIPT,
    "diff.js" is SCRIPT,
    "dom.js" is SCRIPT,
    "model.js" is SCRIPT,
    "policy.js" is SCRIPT,
    "table.js" is SCRIPT,
    "token.js" is SCRIPT,
    "troubles.js" is SCRIPT,
    "units.js" is SCRIPT,
    "views.js" is SCRIPT,
];

/// The file of this name.
#[must_use]
pub fn file(name: &str) -> Option<&'static File> {
    FILES.iter().find(|(own, _)| *own == name).map(|(_, file)| file)
}

impl File {
    /// Changes with the content.
    #[must_use]
    pub fn tag(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.text.hash(&mut hasher);
        format!("\"{:x}\"", hasher.finish())
    }
}
