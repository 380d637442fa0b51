//! Bytes and seconds in readable form.

/// Bytes in a suitable unit.
pub(crate) fn size(bytes: u64) -> String {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let (name, unit) = units.into_iter().find(|(_, unit)| bytes >= unit / 10).unwrap_or(units[2]);
    format!("{:.2} {name}", bytes as f64 / unit as f64)
}

/// A readable duration: `42s`, `3m 05s`, `2h 07m`, `3d 04h`.
pub(crate) fn time(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        3600..86400 => format!("{}h {:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d {:02}h", whole / 86400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_the_unit_that_shows_them() {
        let shown = [0, 600, 3 << 19, 100 << 20, 200 << 20, 80 << 30].map(size);
        assert_eq!(shown, ["0.00 KiB", "0.59 KiB", "1.50 MiB", "100.00 MiB", "0.20 GiB", "80.00 GiB"]);
    }

    #[test]
    fn times_as_people_say_them() {
        let said = [0.2, 59.4, 59.6, 185.0, 3600.0, 7620.0, 273_600.0].map(time);
        assert_eq!(said, ["0s", "59s", "1m 00s", "3m 05s", "1h 00m", "2h 07m", "3d 04h"]);
    }
}
