//! Named paths: which instance of a burst runs is decided once, at queue set-up, from a table.

/// A row of a path table: what the path needs, and how an instance is made.
#[derive(Debug)]
pub struct Row<M> {
    /// The path's name, for `--rx-path`, `--tx-path` and statistics.
    pub name: &'static str,
    /// Features that must be negotiated.
    pub with: u64,
    /// Features that must not be.
    pub without: u64,
    /// Makes an instance.
    pub make: M,
}

/// Why no path was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// There is no such row.
    #[error("no path is called {name}; there are: {known}")]
    Unknown {
        /// What was asked for.
        name: String,
        /// The rows' names.
        known: String,
    },
    /// The row exists, but its needs are not met.
    #[error("path {name} does not fit the negotiated features {features:#x}; those that fit: {fitting}")]
    Unfit {
        /// What was asked for.
        name: String,
        /// The negotiated features.
        features: u64,
        /// The names of the rows that fit.
        fitting: String,
    },
}

/// The best row that fits `features`: the first whose needs are met, or the one called `forced` if its are.
///
/// # Errors
/// [`PathError`] if no row fits, or not the one asked for.
pub fn select<'a, M>(rows: &'a [Row<M>], features: u64, forced: Option<&str>) -> Result<&'a Row<M>, PathError> {
    let fits = |row: &&Row<M>| features & row.with == row.with && features & row.without == 0;
    let names = |rows: &mut dyn Iterator<Item = &Row<M>>| rows.map(|row| row.name).collect::<Vec<_>>().join(", ");
    let wanted = rows.iter().filter(|row| forced.is_none_or(|name| name == row.name));
    if let Some(name) = forced
        && wanted.clone().next().is_none()
    {
        return Err(PathError::Unknown { name: name.to_owned(), known: names(&mut rows.iter()) });
    }
    wanted.clone().find(fits).ok_or_else(|| PathError::Unfit {
        name: forced.unwrap_or("(any)").to_owned(),
        features,
        fitting: names(&mut rows.iter().filter(fits)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROWS: &[Row<()>] = &[
        Row { name: "best", with: 0b11, without: 0, make: () },
        Row { name: "good", with: 0b01, without: 0b10, make: () },
        Row { name: "plain", with: 0, without: 0, make: () },
    ];

    #[test]
    fn the_first_row_whose_needs_are_met_wins() {
        let name = |features| select(ROWS, features, None).unwrap().name;
        assert_eq!([name(0b11), name(0b01), name(0b10), name(0)], ["best", "good", "plain", "plain"]);
    }

    #[test]
    fn a_forced_row_must_exist_and_fit() {
        assert_eq!(select(ROWS, 0b11, Some("plain")).unwrap().name, "plain");
        let unfit = select(ROWS, 0b10, Some("best")).unwrap_err();
        assert_eq!(unfit.to_string(), "path best does not fit the negotiated features 0x2; those that fit: plain");
        let unknown = select(ROWS, 0, Some("fast")).unwrap_err();
        assert_eq!(unknown.to_string(), "no path is called fast; there are: best, good, plain");
    }
}
